"""The HTML report: self-contained, escaped, every chart with its text; and the curves behind it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.curves import Curves
from diagnose.report.evidence import Evidence, line, read_curves, read_evidence
from diagnose.report.html import CHARTED, to_html
from diagnose.report.svg import Series, chart, limits, ticks
from diagnose.result import Verdict
from tests.fixtures.results import HOSTILE, KL, evidence, hostile, kl_spike, with_verdict

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "text",
    [to_html(kl_spike(), evidence()), to_html(hostile(), evidence(HOSTILE)), to_html(kl_spike(), Evidence())],
)
def test_self_contained_and_without_script(text: str) -> None:
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    for _, attributes in page.tags:
        assert not {"src", "href", "xlink:href", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in text and "@import" not in text
    policies = [
        a for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1 and "default-src 'none'" in (policies[0]["content"] or "")


def test_hostile_strings_are_text() -> None:
    text = to_html(hostile(), evidence(HOSTILE))
    assert "<script>alert" not in text and "\x1b" not in text and "\u202e" not in text
    assert "<script>alert(1)</script> [red]x[/]" in Page(text).text


def test_every_chart_has_its_words_and_curves() -> None:
    text = to_html(kl_spike(), evidence())
    figures = re.findall(r"<figure>.*?</figure>", text, re.S)
    assert len(figures) == min(CHARTED, 4)
    for figure in figures:
        assert figure.count("<svg") == 2 and "<figcaption>" in figure
        assert figure.count("<polyline") == 4
    kl = figures[0]
    assert "KL to reference rises from update 12–18 (gradual) in the original" in Page(kl).text
    assert kl.count('class="onset"') == 2 and "log scale" in kl


def test_a_set_draws_each_of_its_members() -> None:
    both = {**evidence().proxy_faulty, **evidence("rollout_precision").proxy_faulty}
    full = Evidence(evidence().original_healthy, evidence().original_faulty, evidence().proxy_healthy, both)
    one = to_html(kl_spike(), full).count("<figure>")
    assert to_html(with_verdict(Verdict.REPRODUCED_NOT_SPECIFIC), full).count("<figure>") == 2 * one


def test_the_curves_are_those_of_the_candidates_strength(tmp_path: Path) -> None:
    for strength, level in (("1", 1.0), ("2", 5.0)):
        path = tmp_path / "runs" / f"f-x{strength}-s1" / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"step": 1, "data": {"m": level}}) + "\n")
    found = read_evidence(tmp_path)
    assert [c.values["m"][0] for c in found.replays("f")] == [1.0]
    assert [c.values["m"][0] for c in found.replays("f", 2.0)] == [5.0]
    assert [c.values["m"][0] for c in found.replays("f", 3.0)] == [1.0]


def test_provenance_is_there() -> None:
    text = Page(to_html(kl_spike(), evidence())).text
    for fact in ("multi_view", "kl_coef: 0.1", "11 of 12 metrics", "1 min 32 s", "proxy/proxy_manifest.json"):
        assert fact in text


def test_no_curves_is_said() -> None:
    assert "No curves were at hand" in to_html(kl_spike(), Evidence())


def make(values: list[float], steps: list[int] | None = None) -> Curves:
    return Curves("t", np.array(steps or range(1, len(values) + 1), dtype=float), {"m": np.array(values)})


def test_line_is_the_median_over_seeds_at_each_step() -> None:
    drawn = line([make([1, 2, np.nan]), make([3, 4, 5]), make([8, 0, 7])], "m")
    assert drawn is not None and drawn.seeds == 3
    assert drawn.y_N.tolist() == [3, 2, 6]
    assert drawn.low_N.tolist() == [1, 0, 5] and drawn.high_N.tolist() == [8, 4, 7]
    assert line([make([np.nan, np.inf])], "m") is None and line([make([1])], "other") is None


def test_thinning_keeps_a_spike() -> None:
    values = [0.0] * 100_000
    values[61_803] = 9.0
    drawn = line([make(values)], "m", points=200)
    assert drawn is not None and len(drawn.x_N) <= 200
    assert drawn.high_N.max() == 9.0 and drawn.y_N.max() == 0.0


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 8))
def test_ticks_are_few_round_and_inside(low: float, span: float, count: int) -> None:
    high = low + span
    if (high - low) < 1e-6 * max(abs(low), abs(high)):
        return
    values = ticks(low, high, count)
    slack = (high - low) * 1e-6
    assert len(values) <= 2 * count + 2
    assert all(low - slack <= value <= high + slack for value in values)


@given(st.lists(st.floats(), max_size=5))
def test_limits_are_never_empty(values: list[float]) -> None:
    values = [v if abs(v) < 1e300 else float("nan") for v in values]
    low, high = limits([np.array(values)])
    assert low < high and np.isfinite([low, high]).all()


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e9, 1e9], [-1.0, -2.0], [1e-12, 1.0]])
@pytest.mark.parametrize("log", [None, 1e-4])
def test_chart_of_awkward_values_has_finite_coordinates(values: list[float], log: float | None) -> None:
    drawn = line([make(values)], "m")
    assert drawn is not None
    text = chart([Series("a", "faulty", drawn)], title=HOSTILE, onset=(-5, 1e9), log_epsilon=log)
    assert "nan" not in text.replace("manifest", "") and "inf" not in text
    Page(text)


def test_run_folder_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    def write(path: str, *lines: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("\n".join(lines))

    record = [json.dumps({"step": n, "data": {KL: value}}) for n, value in [(1, 0.1), (2, None), (3, 0.3)]]
    write("inputs/faulty_0.jsonl", *record)
    write("inputs/healthy_10.jsonl", record[0])
    write("inputs/healthy_9.jsonl", *record[:2])
    write("runs/healthy-s1/metrics.jsonl", *record, '{"step": 4, "da')
    write("runs/stale-x1-s1/metrics.jsonl", "[1]", "null", record[2], "\x00")
    write("runs/empty-x1-s1/metrics.jsonl")
    found = read_evidence(tmp_path)
    assert [len(c.steps_N) for c in found.original_healthy] == [2, 1]
    assert np.isnan(found.original_faulty[0].values[KL][1])
    assert found.proxy_healthy[0].steps_N.tolist() == [1, 2, 3]
    assert list(found.proxy_faulty) == ["stale"] and found.metrics == (KL,)
    assert read_curves(tmp_path / "missing.jsonl") is None
    assert read_evidence(tmp_path / "nowhere") == Evidence()
