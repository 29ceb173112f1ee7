"""Records → runs: merging, conflicts, second runs, resumes; and which raw key becomes which metric."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.logs.assemble import assemble
from diagnose.logs.model import Record, Run
from diagnose.logs.names import VERL

KL, ENTROPY, GRAD, REWARD = "actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean"


def runs(*records: tuple[int, Mapping[str, float]]) -> tuple[Run, ...]:
    found = (Record(line, step, data) for line, (step, data) in enumerate(records, 1))
    return assemble(found, "here", VERL)


def steps(run: Run) -> list[int]:
    return [int(step) for step in run.curves.steps_N]


def values(run: Run, metric: str) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in run.curves.values[metric]]


def test_training_and_validation_of_a_step_are_merged() -> None:
    (run,) = runs((0, {"test_score/toy": 0.5}), (0, {KL: 0.1}), (1, {KL: 0.2}), (1, {"test_score/toy": 0.75}))
    assert steps(run) == [0, 1]
    assert values(run, KL) == [0.1, 0.2]
    assert values(run, "val-core/reward/mean") == [0.5, 0.75]
    assert (run.duplicates, run.conflicts) == (0, 0)


def test_validation_that_comes_a_few_steps_late_is_no_resume() -> None:
    (run,) = runs(
        (1, {KL: 1}), (2, {KL: 2}), (3, {KL: 3}), (2, {"val-core/a/reward/mean@1": 0.5}), (4, {KL: 4})
    )
    assert steps(run) == [1, 2, 3, 4]
    assert values(run, "val-core/reward/mean") == [None, 0.5, None, None]
    assert run.curves.events == ()


def test_the_same_line_from_every_rank_counts_as_duplicates() -> None:
    (run,) = runs(*[(step, {KL: step, ENTROPY: math.nan}) for step in (1, 1, 1, 2, 2, 2)])
    assert steps(run) == [1, 2]
    assert (run.duplicates, run.conflicts) == (8, 0)


def test_conflicting_values_of_a_step_are_counted_and_the_later_one_kept() -> None:
    (run,) = runs((1, {KL: 1, ENTROPY: 1}), (1, {KL: 2, ENTROPY: 1}))
    assert values(run, KL) == [2]
    assert (run.duplicates, run.conflicts) == (1, 1)


@pytest.mark.parametrize("start", [0, 1])
def test_a_fresh_start_is_a_second_run(start: int) -> None:
    first = [(step, {KL: 0.1 * step}) for step in range(start, 20)]
    second = [(step, {KL: 5.0 + step}) for step in range(start, 4)]
    one, two = runs(*first, *second)
    assert steps(one) == list(range(start, 20))
    assert steps(two) == list(range(start, 4))
    assert values(two, KL) == [5.0 + step for step in range(start, 4)]
    assert (one.first_line, one.last_line) == (1, len(first))
    assert two.first_line == len(first) + 1
    assert one.curves.events == two.curves.events == ()


def test_a_fresh_start_of_a_log_with_an_interval_is_a_second_run() -> None:
    one, two = runs((20, {KL: 1}), (40, {KL: 2}), (60, {KL: 3}), (20, {KL: 4}), (40, {KL: 5}))
    assert (steps(one), steps(two)) == ([20, 40, 60], [20, 40])


def test_a_fall_back_to_a_later_step_is_a_resume_and_the_later_values_win() -> None:
    (run,) = runs(
        *[(step, {KL: step, GRAD: 1}) for step in range(1, 11)],
        *[(step, {KL: 100 + step}) for step in range(6, 9)],
    )
    assert steps(run) == list(range(1, 11))
    assert values(run, KL) == [1, 2, 3, 4, 5, 106, 107, 108, 9, 10]
    assert values(run, GRAD) == [1] * 10
    assert run.curves.events == (("resume", 6),)
    assert (run.replaced, run.conflicts, run.duplicates) == (3, 0, 0)


def test_a_run_that_itself_began_by_a_resume_is_resumed_again() -> None:
    (run,) = runs((21, {KL: 1}), (22, {KL: 2}), (23, {KL: 3}), (21, {KL: 4}), (22, {KL: 5}))
    assert values(run, KL) == [4, 5, 3]
    assert run.curves.events == (("resume", 21),)


def test_resumes_can_follow_each_other() -> None:
    (run,) = runs(*[(step, {KL: n}) for n, step in enumerate([1, 2, 3, 4, 3, 4, 2, 3, 4, 5])])
    assert values(run, KL) == [0, 6, 7, 8, 9]
    assert run.curves.events == (("resume", 3), ("resume", 2))


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_lines_are_one_run(seed: int) -> None:
    order = list(map(int, np.random.default_rng(seed).permutation(60)))
    (run,) = runs(*[(step, {KL: 0.1 * step, ENTROPY: 1.0 / (1 + step)}) for step in order])
    assert steps(run) == list(range(60))
    assert values(run, KL) == [0.1 * step for step in range(60)]
    assert run.curves.events == ()
    assert (run.records, run.replaced) == (60, 0)
    assert run.out_of_order == sum(step < max(order[: at + 1]) for at, step in enumerate(order))


def test_pieces_in_the_wrong_order_are_one_run() -> None:
    (run,) = runs(*[(step, {KL: step}) for step in (*range(51, 90), *range(1, 51))])
    assert steps(run) == list(range(1, 90))
    assert (run.first_line, run.last_line, run.out_of_order) == (1, 89, 50)


def test_a_second_run_that_logs_other_keys_too_is_no_disorder() -> None:
    one, two = runs(
        *[(step, {KL: step}) for step in range(1, 9)], *[(step, {KL: 5, GRAD: 1}) for step in range(1, 9)]
    )
    assert (steps(one), steps(two)) == (list(range(1, 9)), list(range(1, 9)))


def test_a_restart_whose_first_step_came_out_the_same_is_a_second_run() -> None:
    """Same seeds, same first step: one repeated value among few is a restart and no disorder."""
    one, two = runs(*[(step, {KL: 0.5 * step}) for step in (*range(1, 21), 1)])
    assert (steps(one), steps(two)) == (list(range(1, 21)), [1])


def test_prose_that_looks_like_a_record_starts_no_run() -> None:
    (run,) = runs(*[(step, {KL: step}) for step in range(1, 30)], (1, {"the/ratio": 5}), (30, {KL: 30}))
    assert steps(run) == list(range(1, 31))
    assert run.curves.events == ()
    assert run.unmapped == ("the/ratio",)


def test_nonfinite_values_are_events_not_values() -> None:
    (run,) = runs((1, {KL: math.nan, ENTROPY: 1}), (2, {ENTROPY: -math.inf}), (3, {KL: 0.5, ENTROPY: 2}))
    assert values(run, KL) == [None, None, 0.5]
    assert values(run, ENTROPY) == [1, None, 2]
    assert run.curves.nonfinite == {KL: (1,), ENTROPY: (2,)}


@pytest.mark.parametrize(("decimals", "expected"), [(3, 1e-3), (None, None), (1, None), (12, None)])
def test_resolution_of_a_rounded_log(decimals: int | None, expected: float | None) -> None:
    found = (Record(n, n, {KL: 0.0, "actor/lr(1e-4)": 0.01}, decimals=decimals) for n in range(1, 20))
    (run,) = assemble(found, "here", VERL)
    assert run.curves.resolution.get(KL) == expected
    if expected is not None:
        assert run.curves.resolution["actor/lr"] == pytest.approx(1e-7)


def test_one_exact_line_is_enough_against_rounding() -> None:
    found = [Record(n, n, {KL: 0.125}, decimals=3) for n in range(1, 40)]
    (run,) = assemble([*found, Record(41, 41, {KL: 1e-5}, decimals=None)], "here", VERL)
    assert run.curves.resolution == {}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([KL, ENTROPY, "x/y"]), st.floats()), max_size=60)
)
def test_any_order_of_records_gives_runs_in_which_nothing_is_lost(
    records: list[tuple[int, str, float]],
) -> None:
    found = runs(*[(step, {key: value}) for step, key, value in records])
    assert sum(run.records for run in found) == len(records)
    logged = {(step, key) for step, key, _ in records if key != "x/y"}
    kept = {
        (int(step), key)
        for run in found
        for key in run.names
        for step, value in zip(run.curves.steps_N, run.curves.values[key], strict=True)
        if np.isfinite(value) or step in run.curves.nonfinite.get(key, ())
    }
    assert kept == logged
    assert {key for run in found for key in run.unmapped} == {key for _, key, _ in records if key == "x/y"}


# names


@pytest.mark.parametrize(
    ("raw", "canonical", "scale"),
    [
        ("actor/kl_loss", "actor/kl_loss", 1.0),
        ("actor/ppo_kl", "actor/ppo_kl", 1.0),
        ("actor/entropy_loss", "actor/entropy", 1.0),
        ("critic/kl", "actor/kl_loss", 1.0),
        ("critic/score/mean", "critic/score/mean", 1.0),
        ("actor/lr(1e-4)", "actor/lr", 1e-4),
        ("val-core/openai/gsm8k/reward/mean@1", "val-core/reward/mean", 1.0),
        ("val-core/math/acc/mean@16", "val-core/reward/mean", 1.0),
        ("val/test_score/openai/gsm8k", "val-core/reward/mean", 1.0),
        ("mismatch/mismatch_k3_kl", "rollout_corr/k3_kl", 1.0),
        ("perf/time_per_step", "timing_s/step", 1.0),
    ],
)
def test_names(raw: str, canonical: str, scale: float) -> None:
    (run,) = runs((1, {raw: 2.0}))
    assert run.names == {raw: canonical}
    assert values(run, canonical) == [2.0 * scale]


@pytest.mark.parametrize(
    "raw",
    [
        "actor/kl",
        "kl",
        "val-core/a/reward/best@4/mean",
        "val-aux/a/reward/mean@1",
        "actor/lr(0)",
        "actor/lr(1e999)",
        "actor/lr(x)",
        "critic/lr(1e-4)",
        "perf/mfu/actor",
        "",
    ],
)
def test_keys_that_are_not_known_are_listed(raw: str) -> None:
    (run,) = runs((1, {raw: 2.0, KL: 1.0}))
    assert run.unmapped == (raw,)
    assert run.names == {KL: KL}


def test_kl_to_the_reference_and_kl_to_the_old_policy_are_never_merged() -> None:
    (run,) = runs((1, {"actor/ppo_kl": 1.0}), (2, {"actor/kl_loss": 2.0}))
    assert values(run, "actor/ppo_kl") == [1, None]
    assert values(run, "actor/kl_loss") == [None, 2]


def test_an_old_name_counts_only_where_the_new_one_is_absent() -> None:
    (run,) = runs((1, {"actor/entropy_loss": 9.0}), (2, {"actor/entropy": 2.0, "actor/entropy_loss": 9.0}))
    assert values(run, "actor/entropy") == [None, 2]
    assert run.unmapped == ("actor/entropy_loss",)


def test_of_two_validation_sets_the_one_with_more_values_counts() -> None:
    rare, often = "val-core/a/reward/mean@1", "val-core/b/reward/mean@1"
    (run,) = runs((1, {rare: 1.0, often: 2.0}), (2, {often: 3.0}))
    assert run.names == {often: "val-core/reward/mean"}
    assert run.unmapped == (rare,)


def test_values_do_not_depend_on_the_pieces_they_are_kept_in(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[tuple[int, Mapping[str, float]]] = [
        (step, {KL: step, ENTROPY: 2 * step} | ({GRAD: 3.0 * step} if step % 3 else {})) for step in range(40)
    ]
    shuffled = [records[at] for at in np.random.default_rng(1).permutation(40)]
    whole = [runs(*records), runs(*shuffled), runs(*records, *records[20:])]
    monkeypatch.setattr("diagnose.logs.assemble.PIECE", 5)
    for before, after in zip(
        whole, [runs(*records), runs(*shuffled), runs(*records, *records[20:])], strict=True
    ):
        assert repr(before) == repr(after)
    (run,) = whole[1]
    assert values(run, GRAD) == [3.0 * step if step % 3 else None for step in range(40)]
