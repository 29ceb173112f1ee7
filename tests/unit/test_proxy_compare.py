"""The tables: paired differences with intervals, from a fake evaluation whose answers are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from proxy.compare import bootstrap, compare
from proxy.errors import BuildError
from tests.fixtures import tiny_moe as tiny

ROWS = tiny.rows(8)
PROMPTS = 40


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny.make_qwen(tmp_path_factory.mktemp("qwen") / "original")


class Fake:
    """Answers the first prompts right: as many as the strategy in the proxy's manifest deserves."""

    def __init__(self, **right: int) -> None:
        self.right = right
        self.seen: list[tuple[str, int, int]] = []

    def __call__(self, folder: Path) -> np.ndarray:
        path = folder / "proxy_manifest.json"
        spec = json.loads(path.read_text())["spec"] if path.exists() else {"strategy": "original"}
        self.seen.append((spec["strategy"], spec.get("experts", 0), spec.get("seed", 0)))
        right = self.right[spec["strategy"]] + (10 * spec["seed"] if spec["strategy"] == "random" else 0)
        return (np.arange(PROMPTS) < right).astype(float)


def test_table_has_the_original_and_paired_differences(qwen):
    fake = Fake(original=38, multi_view=30, frequency=20, random=0)
    table = compare(qwen, [4, 6], ["frequency", "random"], fake, seeds=[0, 1, 2], rows=ROWS)
    assert [(row.strategy, row.experts) for row in table] == [
        ("original", 8),
        *[(name, k) for k in (4, 6) for name in ("multi_view", "frequency", "random")],
    ]
    original, ours, frequency, random = table[:4]
    assert (original.accuracy, original.difference, original.low) == (38 / 40, None, None)
    assert (ours.accuracy, ours.difference, ours.low, ours.high) == (30 / 40, 0, 0, 0)
    assert frequency.difference == pytest.approx(-10 / 40)
    assert frequency.low < -10 / 40 < frequency.high < 0
    assert random.accuracy == pytest.approx((0 + 10 + 20) / 3 / 40)
    assert sorted(fake.seen).count(("random", 4, 1)) == 1
    assert [seen[0] for seen in fake.seen].count("multi_view") == 2


def test_strategies_that_need_outputs_get_them(qwen):
    fake = Fake(original=38, multi_view=30, frequency=20, reap=10)
    table = compare(qwen, [4], ["frequency", "reap"], fake, rows=ROWS)
    assert [row.strategy for row in table] == ["original", "multi_view", "frequency", "reap"]


def test_scratch_proxies_are_removed(qwen, tmp_path):
    compare(qwen, [4], [], Fake(original=1, multi_view=1), rows=ROWS, workdir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interval_is_that_of_the_paired_mean():
    values = np.random.default_rng(0).normal(0.3, 1.0, 400)
    low, high = bootstrap(values)
    standard_error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * standard_error, abs=0.25 * standard_error)
    assert high == pytest.approx(values.mean() + 1.96 * standard_error, abs=0.25 * standard_error)
    assert bootstrap(values) == (low, high)


def test_pairing_makes_the_interval_narrow():
    hard = np.random.default_rng(1).random(400) < 0.5
    better = hard.copy()
    better[:8] = True
    low, high = bootstrap(better.astype(float) - hard)
    assert high - low < 0.03  # two independent accuracies of 400 prompts would differ by ±0.07


def test_evaluation_that_is_none_is_refused(qwen):
    for answer in (np.array([0.5, 1.0]), np.array([]), np.zeros((2, 2))):
        with pytest.raises(BuildError, match="one 0 or 1 for each prompt"):
            compare(qwen, [4], [], lambda _, answer=answer: answer, rows=ROWS)
    lengths = iter((5, 6))
    with pytest.raises(BuildError, match="6 answers for a proxy, 5 for the original"):
        compare(qwen, [4], [], lambda _: np.ones(next(lengths)), rows=ROWS)


def test_bad_requests_fail_before_anything_is_evaluated(qwen):
    def never(_):
        raise AssertionError("evaluated")

    for budgets, names, seeds in (([4], ["magic"], [0]), ([4, 9], [], [0]), ([4], ["random"], [])):
        with pytest.raises(BuildError):
            compare(qwen, budgets, names, never, seeds, rows=ROWS)
