"""`score` end to end on synthetic incidents whose truth is known."""

import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from diagnose.curves import Curves
from diagnose.result import AnomalyType, Direction, Verdict
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.error_study import Setup, healthy_errors
from diagnose.score.noise import Source
from diagnose.score.pair_study import pair_errors
from diagnose.score.plan import Replay
from diagnose.score.power_study import planted
from diagnose.score.score import score
from diagnose.score.simulate import World
from taxonomy.registry import Expectation, FaultCard, Library, Rival, WitnessRule
from taxonomy.stages import Form, Stage

WORLD = World.make()
N = 60
REWARD, KL, ENTROPY, GRAD = "critic/rewards/mean", "actor/kl_loss", "actor/entropy", "actor/grad_norm"
GAP, LAG, CLIP = "training/rollout_probs_diff_mean", "rollout/weight_lag", "actor/pg_clipfrac"
RAMP = np.linspace(0, 1, N)
FAULTS = {
    "no_update": {REWARD: -16 * RAMP, KL: -14 * RAMP, ENTROPY: 9.0},
    "reward_flip": {REWARD: -20 * RAMP, KL: 12 * RAMP, GRAD: -11.0},
    "stale": {GAP: 14 * RAMP, "rollout_corr/kl": 16 * RAMP, CLIP: 9.0},
    "top_k": {GAP: 30.0, "routing/agreement/mean": -25.0, REWARD: -9.0},
    "lr": {GRAD: 14.0, ENTROPY: -15 * RAMP, KL: 25 * RAMP},
    "scale": {"actor/ppo_kl": 12.0, CLIP: 14.0, GRAD: -8.0},
}


def card(fault, *, weights=None, rivals=()):
    signature = tuple(
        Expectation(
            metric, "up" if np.mean(size) > 0 else "down", "immediate", (weights or {}).get(metric, 1)
        )
        for metric, size in FAULTS.get(fault, {}).items()
    )
    return FaultCard(
        id=fault,
        title=fault.replace("_", " "),
        category="optimization",
        symptoms=(),
        mechanism="",
        stage=Stage.LOSS,
        form=Form.OVERRIDES,
        inject="x:y",
        witness=WitnessRule("w", 0, ""),
        signature=signature,
        fix="mend it",
        sources=(),
        rivals=tuple(Rival(name, KL, "look there") for name in rivals),
    )


LIBRARY = Library({name: card(name) for name in FAULTS})


class Case:
    """One incident with everything around it, from one seed."""

    def __init__(self, seed, truth="no_update", *, gain=0.6, start=1, n=N, world=WORLD, original_seeds=0):
        rng = np.random.default_rng(seed)
        self.rng, self.world, self.n = rng, world, n
        self.faulty = [world.run(rng, n, FAULTS.get(truth), start)]
        self.healthy = world.runs(rng, 3, n)
        self.proxy = world.runs(rng, 2, n)
        own = SeedSet.from_curves(world.runs(rng, original_seeds, n)) if original_seeds else None
        self.calibration = Calibration(SeedSet.from_curves(world.runs(rng, 20, n)), "p", "r", own)
        self.replays = [self.replay(name, gain, start) for name in FAULTS]

    def replay(self, fault, gain=0.6, start=1, **kwargs):
        effect = {name: gain * np.asarray(size) for name, size in FAULTS[fault].items()}
        return Replay(fault, self.world.runs(self.rng, 2, self.n, effect, start), from_step=start, **kwargs)

    def score(self, replays=None, library=LIBRARY, healthy=None, **kwargs):
        kwargs = {"calibration": self.calibration} | kwargs
        replays = self.replays if replays is None else replays
        healthy = self.healthy if healthy is None else healthy
        return score(self.faulty, healthy, self.proxy, replays, library, **kwargs)


def edited(run, **rows):
    """Replace metrics of a run; None takes one out."""
    values = {**run.values, **rows}
    return Curves(run.source, run.steps_N, {k: v for k, v in values.items() if v is not None})


@pytest.mark.parametrize(
    "setup",
    [
        Setup(Source.CALIBRATED, 20, 3, 20, 20),
        Setup(Source.STAND_IN, 20, 1, 20),
        Setup(Source.WITHIN_RUN, 2, 2),
    ],
    ids=lambda setup: setup.source.value,
)
def test_healthy_logs_stay_healthy(setup):
    """AR(1) noise of up to 0.95 on 20 metrics: 25 healthy logs, never reproduced, hardly ever called faulty."""
    found = healthy_errors(setup, (0.5, 0.8, 0.95), N, 25, seed=3)
    assert found.faulty <= 3
    assert found.direction <= 5
    assert found.reproduced == 0


def test_a_planted_step_of_three_deviations_is_found_with_its_onset():
    """(1 − φ)·n / (1 + φ) = 13: with two runs in nine of ten, with one in two of three at the very least."""
    one, two = planted(0.5, 40, runs=(1, 2), repeats=25, seed=1)
    assert one.found >= 17 and two.found >= 22
    assert one.onset >= 0.85 * one.found and two.onset >= 0.85 * two.found


@pytest.mark.parametrize("truth", FAULTS)
def test_the_truth_is_found_among_six_although_the_proxy_reacts_less(truth):
    found = Case(11, truth).score()
    best = found.ranking[0]
    assert found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    assert best.fault == truth and best.verdict is found.verdict
    assert best.agreement >= 0.7 and best.coverage == 1.0 and best.evidence == "weak"
    for metric, size in FAULTS[truth].items():
        expected = Direction.UP if np.mean(size) > 0 else Direction.DOWN
        assert best.metrics[metric].original is expected
    assert [item.distance for item in found.ranking] == sorted(item.distance for item in found.ranking)


def test_specific_answers_are_common_right_and_never_given_when_the_truth_is_missing():
    specific = 0
    for seed, truth in enumerate(FAULTS):
        case = Case(100 + seed, truth)
        found = case.score()
        specific += found.verdict is Verdict.REPRODUCED
        assert found.verdict is not Verdict.REPRODUCED or found.ranking[0].fault == truth
        missing = case.score([item for item in case.replays if item.fault != truth])
        assert missing.verdict in (Verdict.NOT_REPRODUCED, Verdict.PARTLY), missing.reasons
        if missing.verdict is Verdict.NOT_REPRODUCED:
            assert missing.reasons[0].startswith("None of these")
    assert specific >= 4


def test_directions_types_onsets_and_symptoms_of_the_original():
    found = Case(5, "no_update", original_seeds=20).score()
    metrics = found.ranking[0].metrics
    assert {"reward_degradation", "no_learning"} <= set(found.symptoms)
    assert metrics[ENTROPY].type_original is metrics[ENTROPY].type_proxy is AnomalyType.IMMEDIATE
    assert metrics[REWARD].type_original is AnomalyType.GRADUAL
    assert metrics[ENTROPY].onset_original[0] == 1
    assert metrics[REWARD].onset_original[1] > metrics[ENTROPY].onset_original[1]
    assert metrics[REWARD].trend > 0.9
    assert len(metrics[REWARD].blocks_original) == 8
    still = [item for name, item in metrics.items() if name not in FAULTS["no_update"]]
    assert sum(item.original is Direction.NONE for item in still) > len(still) / 2
    assert all(item.trend is None for item in still if {item.original, item.proxy} == {Direction.NONE})
    entropy = metrics[ENTROPY]
    assert (entropy.effect_original > entropy.margin_original) == (entropy.original is Direction.UP)


def test_identical_rivals_come_back_as_a_set():
    case = Case(7, "stale")
    effect = {name: 0.6 * np.asarray(size) for name, size in FAULTS["stale"].items()}
    twin = Replay("twin", WORLD.runs(case.rng, 2, N, effect))
    found = case.score([*case.replays, twin])
    assert found.verdict is Verdict.REPRODUCED_NOT_SPECIFIC
    assert {item.fault for item in found.ranking[:2]} == {"stale", "twin"}
    assert found.ranking[0].rivals == (found.ranking[1].fault,)
    assert found.ranking[1].rivals == (found.ranking[0].fault,)


def test_a_set_names_the_metric_that_would_split_it_even_if_the_original_lacks_it():
    case = Case(8, "stale")
    lag = np.zeros(N)
    late = edited(case.world.run(case.rng, N), **{LAG: lag})
    effect = {name: 0.6 * np.asarray(size) for name, size in FAULTS["stale"].items()}

    def with_lag(runs, value):
        return [edited(run, **{LAG: lag + value}) for run in runs]

    case.proxy = with_lag(case.proxy, 0.0)
    case.calibration = replace(
        case.calibration, proxy=SeedSet.from_curves(with_lag(case.calibration.proxy.curves(), 0.0))
    )
    replays = [
        Replay("stale", with_lag(WORLD.runs(case.rng, 2, N, effect), 4.0)),
        Replay("twin", with_lag(WORLD.runs(case.rng, 2, N, effect), 0.0)),
        *(replace(item, runs=with_lag(item.runs, 0.0)) for item in case.replays if item.fault != "stale"),
    ]
    found = case.score(replays)
    best = found.ranking[0]
    assert best.rivals and best.split_by == LAG
    assert any("log it in the original" in reason for reason in best.reasons)
    assert late.values[LAG].shape == (N,)


def exact(case, original, **replayed):
    """Put weight lag, 0 in every healthy run, into a case; `replayed` gives it by fault, 0 for the others."""

    def lagging(runs, lag):
        return [edited(run, **{LAG: np.full(N, float(lag))}) for run in runs]

    case.faulty, case.healthy, case.proxy = (
        lagging(case.faulty, original),
        lagging(case.healthy, 0),
        lagging(case.proxy, 0),
    )
    seeds = SeedSet.from_curves(lagging(case.calibration.proxy.curves(), 0))
    case.calibration = replace(case.calibration, proxy=seeds)
    case.replays = [
        replace(item, runs=lagging(item.runs, replayed.get(item.fault, 0))) for item in case.replays
    ]
    return case


@pytest.mark.parametrize(("original", "replayed"), [(0, 0.4), (0.4, 0), (0, 40)])
def test_an_exact_metric_denies_the_nearest_candidate(original, replayed):
    case = Case(8, "stale")
    case.replays.append(replace(case.replay("stale"), fault="twin"))
    assert {item.fault for item in case.score().ranking[:2]} == {"stale", "twin"}, "alike without it"
    found = exact(case, original, stale=original, twin=replayed).score()
    first = found.ranking[0]
    assert first.fault == "stale" and not first.rivals
    assert ("only weight lag tells it from: twin" in first.doubts) == (max(original, replayed) < 1)
    twin = next(item for item in found.ranking if item.fault == "twin")
    assert twin.verdict not in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    assert any("not the only cause: weight lag is" in reason for reason in twin.reasons)
    denied = [any("not the only cause" in reason for reason in item.reasons) for item in found.ranking]
    assert denied == sorted(denied), "whom nothing denies comes first"
    assert sum(denied) == (1 if original == 0 else len(FAULTS))


def test_a_metric_that_healthy_seeds_move_or_that_is_moved_now_and_then_denies_nothing():
    case = exact(Case(8, "stale"), 0, stale=4)
    case.proxy[0].values[LAG][::2] = 3.0  # healthy runs lag too: not exact in this system
    assert not any("not the only cause" in reason for item in case.score().ranking for reason in item.reasons)
    case = exact(Case(8, "stale"), 0, stale=0)
    for run in next(item for item in case.replays if item.fault == "stale").runs:
        run.values[LAG][:8] = 4.0  # one block of eight
    assert not any("not the only cause" in reason for item in case.score().ranking for reason in item.reasons)


def test_without_a_twin_an_exact_metric_denies_nothing():
    case = exact(Case(8, "stale", start=21), 4, stale=0)
    found = case.score(healthy=[])
    assert not any("not the only cause" in reason for item in found.ranking for reason in item.reasons)


def test_every_member_of_a_set_is_told_what_would_split_it():
    """The rival's card counts as well as one's own, and where nothing is known that is said."""
    case = Case(7, "stale")
    effect = {name: 0.6 * np.asarray(size) for name, size in FAULTS["stale"].items()}
    twins = [Replay(name, WORLD.runs(case.rng, 2, N, effect)) for name in ("twin", "third")]
    named = Library({**LIBRARY.cards, "twin": card("twin", rivals=("stale",))})
    found = case.score([*case.replays, *twins], library=named)
    by_fault = {item.fault: item for item in found.ranking}
    stale = by_fault["stale"]
    assert {"twin", "third"} <= set(stale.rivals)
    assert stale.split_by == KL
    assert any("The card of twin names what splits it from stale" in reason for reason in stale.reasons)
    assert any("splits it from third" in reason and "--probe" in reason for reason in stale.reasons)


def test_the_order_of_candidates_changes_nothing():
    case = Case(9, "top_k")
    assert case.score() == case.score(case.replays[::-1])


def test_cards_shape_verdicts_but_never_the_ranking():
    case = Case(10, "lr")
    skewed = Library({name: card(name, weights={REWARD: 2, KL: 2}) for name in FAULTS})
    plain, other, none = case.score(), case.score(library=skewed), case.score(library=Library())
    for left, right in ((plain, other), (plain, none)):
        assert [(a.fault, a.distance, a.specificity) for a in left.ranking] == [
            (b.fault, b.distance, b.specificity) for b in right.ranking
        ]


def test_a_constant_added_to_a_metric_of_one_system_changes_nothing():
    case = Case(12, "no_update")
    before = case.score()
    for runs in (case.faulty, case.healthy):
        runs[:] = [edited(run, **{ENTROPY: run.values[ENTROPY] + 3.0}) for run in runs]
    after = case.score()
    assert after.verdict is before.verdict
    assert [item.fault for item in after.ranking] == [item.fault for item in before.ranking]
    np.testing.assert_allclose(
        [item.distance for item in after.ranking], [item.distance for item in before.ranking], rtol=1e-9
    )


def test_more_than_one_strength_ranks_the_nearest_and_says_so():
    case = Case(13, "stale")
    strengths = [replace(case.replay("stale", gain), severity=gain) for gain in (0.1, 0.8, 6.0)]
    found = case.score([item for item in case.replays if item.fault != "stale"] + strengths)
    best = found.ranking[0]
    assert (best.fault, best.severity) == ("stale", 0.8)
    assert [item.fault for item in found.ranking].count("stale") == 1
    assert any("3 strengths" in reason for reason in best.reasons)


def test_without_a_witness_it_is_a_failed_injection_and_never_not_reproduced():
    case = Case(14, "stale")
    unwitnessed = [replace(item, witness={"w": 0.0}, witness_ok=False) for item in case.replays]
    alone = case.score(unwitnessed)
    assert alone.verdict is Verdict.INJECTION_FAILED
    assert all(
        item.verdict is Verdict.INJECTION_FAILED and math.isnan(item.distance) for item in alone.ranking
    )
    mixed = case.score(
        [item for item in case.replays if item.fault != "lr"]
        + [item for item in unwitnessed if item.fault == "lr"]
    )
    assert mixed.ranking[-1].fault == "lr" and mixed.verdict in (
        Verdict.REPRODUCED,
        Verdict.REPRODUCED_NOT_SPECIFIC,
    )


def test_a_replay_that_failed_is_listed_with_its_reason():
    case = Case(15, "stale")
    found = case.score([*case.replays[1:], Replay("no_update", [], failure="out of memory")])
    last = found.ranking[-1]
    assert last.verdict is Verdict.INCONCLUSIVE and "out of memory" in last.reasons[0]


def test_a_stand_in_is_never_specific():
    case = Case(100, "no_update", original_seeds=20)
    assert case.score().verdict is Verdict.REPRODUCED and case.score().ranking[0].evidence == "strong"
    found = case.score(stand_in=True)
    assert found.verdict is Verdict.REPRODUCED_NOT_SPECIFIC
    assert {item.evidence for item in found.ranking} == {"stand-in"}
    assert any("stand-in" in reason for reason in found.reasons)


def test_one_candidate_alone_is_never_specific():
    case = Case(100, "no_update")
    found = case.score(case.replays[:1])
    assert found.verdict is Verdict.REPRODUCED_NOT_SPECIFIC and found.ranking[0].specificity is None


def test_a_look_alike_that_was_not_replayed_forbids_a_specific_answer():
    case = Case(100, "no_update")
    library = Library({**LIBRARY.cards, "no_update": card("no_update", rivals=("nan_skip",))})
    assert case.score().verdict is Verdict.REPRODUCED
    found = case.score(library=library)
    assert found.verdict is Verdict.REPRODUCED_NOT_SPECIFIC
    assert any("nan_skip" in reason for reason in found.ranking[0].reasons)


def test_candidates_that_were_not_reached_forbid_a_specific_answer():
    case = Case(100, "no_update")
    found = case.score(unreached=("nan_skip", "drift"))
    first = found.ranking[0]
    assert found.verdict is Verdict.REPRODUCED_NOT_SPECIFIC and first.fault == "no_update"
    assert first.doubts == (
        "2 candidates were not replayed, and any of them may do the same: nan_skip, drift",
    )
    assert first.doubts[0] in found.reasons[0]
    assert case.score(unreached=("no_update",)).verdict is Verdict.REPRODUCED, "it was replayed after all"


@pytest.mark.parametrize(
    ("failure", "specific"),
    [
        ("worker died (SIGKILL)", False),
        ("injection failed: the checkpoint has no buffers to lose", True),
    ],
)
def test_a_broken_replay_leaves_its_fault_open_and_a_model_without_the_part_rules_it_out(failure, specific):
    case = Case(100, "no_update")
    found = case.score([*case.replays, Replay("nan_skip", [], failure=failure)])
    assert (found.verdict is Verdict.REPRODUCED) == specific
    named = Library({**LIBRARY.cards, "no_update": card("no_update", rivals=("nan_skip",))})
    found = case.score([*case.replays, Replay("nan_skip", [], failure=failure)], library=named)
    assert (found.verdict is Verdict.REPRODUCED) == specific


def test_a_primary_metric_that_goes_the_other_way_denies_reproduction():
    case = Case(16, "no_update")
    library = Library({**LIBRARY.cards, "no_update": card("no_update", weights={KL: 2})})
    against = {**FAULTS["no_update"], KL: -np.asarray(FAULTS["no_update"][KL])}
    replay = Replay(
        "no_update", WORLD.runs(case.rng, 2, N, {k: 0.9 * np.asarray(v) for k, v in against.items()})
    )
    found = case.score([replay, *case.replays[1:]], library)
    mine = next(item for item in found.ranking if item.fault == "no_update")
    assert mine.verdict is Verdict.NOT_REPRODUCED
    assert any("other way" in reason for reason in mine.reasons)


def test_missing_card_metrics_make_a_candidate_inconclusive():
    case = Case(17, "stale")
    gone = {GAP: None, "rollout_corr/kl": None}
    case.faulty, case.healthy = (
        [edited(run, **gone) for run in runs] for runs in (case.faulty, case.healthy)
    )
    found = case.score()
    stale = next(item for item in found.ranking if item.fault == "stale")
    assert stale.verdict is Verdict.INCONCLUSIVE and stale.coverage == pytest.approx(1 / 3)
    assert stale.metrics[GAP].original is Direction.UNDETERMINED


def test_a_proxy_that_does_not_learn_gives_no_verdict():
    case = Case(18, "no_update")
    flat = replace(WORLD, drift_M=np.zeros_like(WORLD.drift_M))
    case.world = flat
    case.proxy = flat.runs(case.rng, 2, N)
    case.calibration = Calibration(SeedSet.from_curves(flat.runs(case.rng, 20, N)), "p", "r")
    case.replays = [case.replay(name) for name in FAULTS]
    found = case.score()
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "does not follow" in found.healthy_gate and found.healthy_gate in found.reasons


def test_eight_updates_rank_but_do_not_judge():
    case = Case(19, "top_k", n=8)
    found = case.score()
    assert found.verdict is Verdict.INCONCLUSIVE and "Too short" in found.reasons[0]
    assert found.ranking[0].fault == "top_k" and math.isfinite(found.ranking[0].distance)
    assert found.ranking[0].metrics[GAP].original is Direction.UP


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_even_shorter_logs_do_no_harm(n):
    assert Case(20, "top_k", n=n).score().verdict is Verdict.INCONCLUSIVE


def test_nothing_usable_is_said_plainly():
    case = Case(21)
    empty = Curves("empty", np.empty(0), {})
    for faulty, proxy in (([], case.proxy), ([empty], case.proxy), (case.faulty, [])):
        found = score(faulty, case.healthy, proxy, case.replays, LIBRARY)
        assert found.verdict is Verdict.INCONCLUSIVE and len(found.ranking) == len(FAULTS)


def test_holes_constants_and_metrics_on_one_side_only():
    case = Case(22, "stale")
    holes = case.rng.random(N) < 0.4
    constant = {"routing/agreement/mean": np.ones(N), "critic/advantages/max": np.zeros(N)}

    def spoilt(run, **more):
        row = np.where(holes, np.nan, run.values[ENTROPY])
        return edited(run, **{ENTROPY: row, **constant, **more})

    case.faulty = [
        spoilt(run, **{LAG: np.zeros(N), "response_length/mean": np.full(N, 7.0)}) for run in case.faulty
    ]
    case.healthy = [spoilt(run, **{LAG: np.zeros(N)}) for run in case.healthy]
    case.proxy = [spoilt(run, **{"actor/pg_loss": None}) for run in case.proxy]
    case.replays = [
        replace(item, runs=[spoilt(run, **{"actor/pg_loss": None}) for run in item.runs])
        for item in case.replays
    ]
    for calibration in (
        None,
        replace(
            case.calibration,
            proxy=SeedSet.from_curves([spoilt(run) for run in case.calibration.proxy.curves()]),
        ),
    ):
        found = case.score(calibration=calibration)
        assert found.ranking[0].fault == "stale"
        assert all(math.isfinite(item.distance) for item in found.ranking)
        assert found.ranking[0].metrics["routing/agreement/mean"].original in (
            Direction.NONE,
            Direction.UNDETERMINED,
        )


def test_runs_of_different_lengths_are_compared_over_the_common_updates():
    case = Case(23, "stale")
    case.faulty = [WORLD.run(case.rng, 100, FAULTS["stale"])]
    case.healthy = [WORLD.run(case.rng, n) for n in (100, 80, 70)]
    found = case.score()
    assert found.ranking[0].fault == "stale"
    assert found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)


def test_what_happens_beyond_the_replays_is_not_judged():
    case = Case(24, "stale")
    effect = {GRAD: np.r_[np.zeros(150), np.full(50, 40.0)]}
    case.faulty = [WORLD.run(case.rng, 200, effect)]
    case.healthy = WORLD.runs(case.rng, 3, 200)
    found = case.score(from_step=1)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "replay more steps" in found.reasons[0] and "gradient norm" in found.reasons[0]


def test_a_fault_in_the_middle_is_put_on_its_own_clock():
    case = Case(25, "top_k", n=80, start=31)
    for known in (31, None):
        found = case.score(from_step=known)
        assert found.ranking[0].fault == "top_k"
        assert found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
        assert found.ranking[0].metrics[GAP].type_original is AnomalyType.IMMEDIATE
        assert found.ranking[0].metrics[GAP].onset_original[0] == 31


def test_the_onset_is_found_where_nobody_knows_it():
    """Replayed from the first step, incident from the 31st: the clocks still agree."""
    case = Case(26, "top_k", n=80, start=31)
    case.replays = [case.replay(name) for name in FAULTS]
    found = case.score()
    assert found.ranking[0].fault == "top_k"
    assert found.ranking[0].metrics[GAP].onset_original[0] == 31
    assert found.ranking[0].metrics[GAP].onset_proxy[0] == 1


def both_of(seed, first, second):
    case = Case(seed, first)
    names = {*FAULTS[first], *FAULTS[second]}
    effect = {
        name: np.asarray(FAULTS[first].get(name, 0.0)) + np.asarray(FAULTS[second].get(name, 0.0))
        for name in names
    }
    case.faulty = [WORLD.run(case.rng, N, effect)]
    return case


@pytest.mark.parametrize(("first", "second"), [("stale", "no_update"), ("top_k", "scale"), ("lr", "top_k")])
def test_two_faults_at_once_are_named_as_two(first, second):
    found = both_of(41, first, second).score()
    assert set(found.together) == {first, second}
    assert found.verdict is not Verdict.REPRODUCED
    assert all(item.verdict is not Verdict.REPRODUCED for item in found.ranking)
    assert found.reasons[0].startswith("More than one cause fits together")
    assert not any(reason.startswith("None of these") for reason in found.reasons)


@pytest.mark.parametrize("truth", FAULTS)
@pytest.mark.parametrize("gain", [0.35, 1.6])
def test_one_fault_is_never_split_in_two_however_strong_it_is(truth, gain):
    assert Case(42, truth, gain=gain).score().together == ()


def test_half_a_pair_in_the_library_makes_no_pair():
    case = both_of(43, "stale", "no_update")
    found = case.score(replays=[item for item in case.replays if item.fault != "no_update"])
    assert found.together == ()


def test_two_faults_simulated():
    row = pair_errors("pair", 8, seed=2)
    assert row.exact >= 5 and row.pair == row.exact and row.specific == 0
    assert pair_errors("unknown", 4, seed=2).pair == 0


def test_without_a_twin_both_sides_are_measured_against_their_past():
    case = Case(27, "top_k", n=80, start=31)
    case.healthy = []
    found = case.score()
    assert found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    assert found.ranking[0].fault == "top_k" and found.ranking[0].evidence == "weak"
    assert any("own past" in reason for reason in found.reasons)


def test_without_a_twin_a_healthy_drift_is_no_fault():
    """Reward and KL move in healthy runs as well; only what the healthy proxy does not do counts."""
    for seed in range(4):
        case = Case(30 + seed, "top_k", n=80, start=31)
        case.healthy, case.faulty = [], [WORLD.run(case.rng, 80)]
        assert case.score().verdict is Verdict.INCONCLUSIVE


def test_without_twin_and_without_past_there_is_a_ranking_but_no_verdict():
    case = Case(28, "no_update")
    case.healthy = []
    found = case.score()
    assert found.verdict is Verdict.INCONCLUSIVE and "No healthy twin" in found.reasons[0]
    assert found.ranking[0].fault == "no_update"
    undetermined = {item.original for item in found.ranking[0].metrics.values()}
    assert undetermined == {Direction.UNDETERMINED}


def test_a_level_that_no_healthy_system_has_is_a_direction_even_without_a_twin():
    case = Case(29, "no_update")
    case.healthy = []
    case.faulty = [edited(run, **{GAP: np.full(N, 0.3)}) for run in case.faulty]
    assert case.score().ranking[0].metrics[GAP].original is Direction.UP


def test_nonfinite_incidents_match_nonfinite_replays():
    case = Case(40, "lr")

    def broken(run, at):
        bad = run.steps_N >= at
        values = {name: np.where(bad, np.nan, row) for name, row in run.values.items()}
        steps = tuple(int(step) for step in run.steps_N[bad])
        return Curves(
            "t", run.steps_N, values, {name: steps for name in (GRAD, KL, "actor/pg_loss", ENTROPY)}
        )

    case.faulty = [broken(WORLD.run(case.rng, N), 36)]
    overflow = Replay("overflow", [broken(run, 34) for run in WORLD.runs(case.rng, 2, N)])
    found = case.score([*case.replays, overflow])
    assert found.ranking[0].fault == "overflow"
    assert found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    assert found.ranking[0].metrics[GRAD].type_original is AnomalyType.NONFINITE
    without = case.score()
    assert without.verdict is Verdict.NOT_REPRODUCED


def test_every_verdict_says_where_its_noise_comes_from_and_how_often_it_errs():
    case = Case(41, "stale")
    borrowed, own = case.score(), Case(41, "stale", original_seeds=20).score()
    assert any("borrowed from 20 healthy seeds" in reason for reason in borrowed.reasons)
    assert any("20 healthy seeds of the original; p = 0.048" in reason for reason in own.reasons)
    assert own.error_rates["smallest p"] == pytest.approx(1 / 21)
    assert set(borrowed.error_rates) == set(own.error_rates) and len(own.error_rates) == 3
    nothing = case.score(calibration=None)
    assert nothing.error_rates["smallest p"] == 1.0 and nothing.ranking[0].evidence == "weak"


def test_fast_enough_to_be_used_interactively():
    world = World.make(count=25)
    case = Case(42, "stale", world=world)
    extra = [replace(case.replay("lr"), fault=name) for name in ("x", "y")]
    case.score([*case.replays, *extra])
    before = time.process_time()
    case.score([*case.replays, *extra])
    assert time.process_time() - before < 1.0


def test_importing_the_scoring_is_cheap():
    code = (
        "import sys, diagnose.score.score, diagnose.score.calibration;"
        "print([name for name in ('torch', 'transformers', 'scipy.stats', 'scipy.special') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
