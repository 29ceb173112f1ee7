"""Probes and remedies: what they make of runs whose truth is known."""

import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from diagnose import probes, remedies
from diagnose.probes import PROBES, STEPS, compare
from diagnose.report.words import probes_found
from diagnose.result import Direction, ProbeResult
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.session import PlannedFault, Session, fault_spec
from diagnose.store import RunFolder
from proxy.specs import BuildSpec, EngineSpec, Recipe
from taxonomy.registry import library
from taxonomy.remedies import OF_VERL, REMEDIES, REMEDY_BY_ID, offered
from tests.fixtures.results import candidate, kl_spike
from tests.unit.test_score import CLIP, GAP, KL, LIBRARY, REWARD, WORLD, Verdict

CARDS = library()
N = 60


def runs(seed, effect=None, n=STEPS, count=3):
    return WORLD.runs(np.random.default_rng(seed), count, n, effect)


def session(*faults, **changes):
    planned = tuple(PlannedFault(f, 1.0, fault_spec(CARDS[f], 1.0, 21)) for f in faults)
    base = Session(
        "x", "s", "local", "checkpoint", "embedded:qwen3_moe", BuildSpec("c", "o", 12), Recipe(), (1, 2), planned
    )  # fmt: skip
    return replace(base, **changes)


# --- probes


def test_a_probe_is_read_off_the_metric_that_goes_another_way():
    both = {REWARD: -40.0}
    found = compare(
        PROBES[0],
        ("stale", "lr"),
        runs(1, both | {GAP: 60.0}),
        runs(2, both),
        runs(3),
        [GAP, REWARD],
        LIBRARY,
    )
    assert (found.metric, found.directions[0]) == (GAP, Direction.UP)
    assert found.directions[1] not in (Direction.UP, Direction.DOWN)
    assert found.values[0] > found.values[1] and found.apart > 3
    assert "goes up" in found.advice and "stays where a healthy run has it" in found.advice
    assert found.advice.index("stale") < found.advice.index("if it stays")


def test_a_metric_that_the_original_does_not_log_decides_nothing():
    found = compare(PROBES[0], ("stale", "lr"), runs(1, {GAP: 60.0}), runs(2), runs(3), [REWARD], LIBRARY)
    assert found.metric == "" and found.advice == ""


def test_two_faults_that_do_the_same_under_a_probe_are_not_split_by_it():
    effect = {KL: 40.0, CLIP: 30.0}
    found = compare(
        PROBES[0], ("stale", "lr"), runs(1, effect), runs(2, effect), runs(3), [KL, CLIP], LIBRARY
    )
    assert found.metric == ""


def test_a_metric_whose_level_belies_its_direction_decides_nothing(monkeypatch):
    """The blocks may say "down" while the median over the second half lies above a healthy run's."""
    medians = iter(
        (0.9, 1.0, 1.1)
    )  # of the first fault, the second, a healthy run: up, said of a value below
    monkeypatch.setattr("diagnose.probes.median_between", lambda *_, **__: next(medians))
    found = compare(PROBES[0], ("stale", "lr"), runs(1, {GAP: 60.0}), runs(2), runs(3), [GAP], LIBRARY)
    assert found.metric == "" and found.advice == ""


def test_experiments_are_told_the_cheapest_first_against_the_healthy_level():
    def item(probe, settings, rival, values=(0.8, -0.4, 0.1), ways=(Direction.UP, Direction.DOWN)):
        return ProbeResult(
            probe, f"Do {probe}", settings, 20, ("a", rival), KL, ways, values, 5.0, "old words"
        )

    two, one = {"x": 1, "y": 2}, {"x": 1}
    probes = (item("dear", two, "b"), item("cheap", one, "b"), item("both", one, "b"), item("both", one, "c"))
    belied = item("belied", one, "b", values=(0.8, 0.2, 0.1))  # "down", above healthy: never told
    more = (item("third", two, "b"), item("fourth", two, "b"))
    found = probes_found(replace(kl_spike(), probes=(*probes, belied, *more)))
    assert [line.split(",")[0] for line in found[:3]] == ["Do both", "Do cheap", "Do dear"]
    assert found[3] == "2 more experiments are in the JSON report." and len(found) == 4
    assert "0.8 (▲ above healthy) if it is a or −0.4 (▼ below healthy) if it is b; healthy 0.1" in found[0]
    assert "if it is c" in found[0] and "old words" not in "".join(found)


def test_opposite_ways_decide_too():
    found = compare(
        PROBES[0], ("a", "b"), runs(1, {KL: 40.0}), runs(2, {KL: -40.0}), runs(3), [KL], LIBRARY_AB
    )
    assert found.metric == KL and "goes up" in found.advice and "goes down" in found.advice


LIBRARY_AB = replace(LIBRARY, cards={"a": LIBRARY["stale"], "b": LIBRARY["lr"]})


def test_probes_are_short_from_the_first_step_and_only_for_a_set(tmp_path):
    base = kl_spike().score
    named = ("stale_weights", "rollout_weight_quantization")
    ranking = tuple(
        candidate(
            f, Verdict.REPRODUCED_NOT_SPECIFIC, 0.1 + k, rivals=named[1 - k :][: 1 - k], severity=2.0 - k
        )
        for k, f in enumerate(named)
    )
    score = replace(base, ranking=ranking)
    planned = probes.plan(session(*named), RunFolder(tmp_path), score, CARDS)
    assert len(planned) == len({run.id for run in planned}) == len(PROBES) * 3 * len(probes.SEEDS)
    strong = [run for run in planned if run.fault == "stale_weights"]
    assert {run.spec.fault.from_step for run in strong} == {1} and {
        run.spec.recipe.steps for run in strong
    } == {STEPS}
    assert all(run.spec.fault.params == CARDS["stale_weights"].values(2.0) for run in strong)
    alone = replace(score, ranking=(replace(ranking[0], rivals=()),))
    assert probes.plan(session(*named), RunFolder(tmp_path), alone, CARDS) == []
    assert probes.results(session(*named), RunFolder(tmp_path), score, [KL], CARDS) == ()


@pytest.mark.parametrize("item", [*PROBES, *REMEDIES], ids=lambda item: item.id)
def test_probes_and_remedies_set_fields_that_a_recipe_has(item):
    known = {field.name for field in fields(Recipe)}
    settings = item.settings if item in PROBES else item.overrides(asdict(Recipe()))
    assert settings and set(settings) <= known
    changed = replace(Recipe(), **settings)
    assert changed != Recipe()
    for name, value in settings.items():
        assert isinstance(value, type(getattr(Recipe(), name))), name


# --- remedies


@pytest.fixture(scope="module")
def clinic():
    healthy = runs(10, n=N, count=2)
    calibration = Calibration(SeedSet.from_curves(runs(11, n=N, count=20)), "p", "r")
    planned = PlannedFault("stale_weights", 1.0, fault_spec(CARDS["stale_weights"], 1.0, 1))

    def judge(effect, fixed):
        ill = runs(12, effect, N, 2)
        after = [] if fixed is None else runs(13, fixed, N, 2)
        remedy = REMEDY_BY_ID["old_from_trainer"]
        return remedies.judge(planned, remedy, asdict(Recipe()), ill, after, healthy, calibration, CARDS)

    return judge


EFFECT = {GAP: 20.0, KL: 15.0, REWARD: -12.0}


def test_a_remedy_under_which_nothing_is_left_makes_the_effect_vanish(clinic):
    found = clinic(EFFECT, {})
    assert found.outcome == "vanishes" and found.left == () and found.gone > 0.9


def test_a_remedy_that_changes_nothing_does_not_help(clinic):
    found = clinic(EFFECT, EFFECT)
    assert found.outcome == "does not help" and abs(found.gone) < 0.2
    assert {GAP, KL, REWARD} <= set(found.left)


def test_a_remedy_may_help_in_part_or_make_it_worse(clinic):
    found = clinic(EFFECT, {GAP: 20.0, KL: 15.0})
    assert found.outcome == "partly gone" and found.left == (KL, GAP)
    worse = clinic(EFFECT, {name: 6 * size for name, size in EFFECT.items()})
    assert worse.outcome == "makes it worse" and worse.gone < -0.3


def test_a_remedy_without_a_run_says_so(clinic):
    found = clinic(EFFECT, None)
    assert found.outcome == "could not be run" and math.isnan(found.gone)


def test_a_remedy_that_the_recipe_already_has_is_not_tried(tmp_path):
    score = replace(kl_spike().score, ranking=(candidate("stale_weights", Verdict.REPRODUCED, 0.1),))
    plain = session("stale_weights")
    planned = remedies.plan(plain, RunFolder(tmp_path), score, CARDS)
    assert [run.id for run in planned] == [
        f"fix.{remedy}.stale_weights-x1-s{seed}"
        for remedy in CARDS["stale_weights"].remedies
        for seed in (1, 2)
    ]
    assert {run.spec.fault.from_step for run in planned} == {21}
    has = replace(plain, recipe=replace(Recipe(), old_log_prob="trainer"))
    assert {run.id.split(".")[1] for run in remedies.plan(has, RunFolder(tmp_path), score, CARDS)} == {
        "importance_weights"
    }


def test_enough_cards_name_a_remedy_and_no_remedy_is_the_fault_switched_off():
    with_remedy = [card for card in CARDS.cards.values() if card.remedies]
    assert len(with_remedy) >= 10
    assert "slower" not in CARDS["learning_rate_too_high"].remedies
    assert "stronger_kl" not in CARDS["kl_term_missing"].remedies + CARDS["kl_sign_flipped"].remedies


def on_verl(*faults):
    return session(*faults, engine="verl", engine_spec=EngineSpec("verl", rollout_dtype="bf16"))


def test_verl_has_remedies_of_its_own_where_rollout_and_trainer_disagree(tmp_path):
    score = replace(kl_spike().score, ranking=(candidate("stale_weights", Verdict.REPRODUCED, 0.1),))
    runs_of = {
        run.id.split(".")[1]: run
        for run in remedies.plan(on_verl("stale_weights"), RunFolder(tmp_path), score, CARDS)
    }
    tried = {remedy.id for remedy in OF_VERL if not remedy.needs}
    assert set(runs_of) == {*CARDS["stale_weights"].remedies, *tried}
    sequence = runs_of["sequence_weights"].spec
    assert "algorithm.rollout_correction.rollout_is=sequence" in sequence.engine.hydra
    assert sequence.recipe.old_log_prob == "trainer" and sequence.fault.id == "stale_weights"
    assert runs_of["same_precision"].spec.engine.rollout_dtype == "fp32"
    keys = {run.spec.key("model") for run in runs_of.values()}
    assert len(keys) == len(runs_of), "two remedies are one run"


def test_verls_remedies_are_not_offered_elsewhere():
    assert {item.id for item in offered(["importance_weights"], "local")} == {"importance_weights"}
    assert {item.id for item in offered(["stronger_kl"], "verl")} == {"stronger_kl"}


def test_a_remedy_that_the_engine_lacks_is_named_with_what_it_needs(tmp_path):
    score = replace(kl_spike().score, ranking=(candidate("stale_weights", Verdict.REPRODUCED, 0.1),))
    folder = RunFolder(tmp_path)
    assert remedies.results(on_verl("stale_weights"), folder, score, [], None, CARDS) == ()  # nobody asked
    (folder.extra / "fix.sequence_weights.stale_weights-x1-s1").mkdir(parents=True)
    found = remedies.results(on_verl("stale_weights"), folder, score, [], None, CARDS)
    assert [(item.remedy, item.outcome.split()[0]) for item in found] == [("router_replay", "needs")]
