"""What a session plans: which replays in which order, where faults are injected, what proves an injection."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.answer import exit_code
from diagnose.curves import Curves
from diagnose.errors import DiagnoseError, ExitCode, RunError
from diagnose.lab import changed
from diagnose.prepare import Overrides, injection_step, prepare, visible_symptoms
from diagnose.result import Result, Score, Verdict
from diagnose.run import Outputs
from diagnose.score.onset import Onset
from diagnose.scoring import judge_witness
from diagnose.session import PlannedFault, Session, fault_spec, plan_runs, recipe_hash
from diagnose.store import RunFolder
from proxy.specs import BuildSpec, Recipe
from taxonomy.registry import library

CARDS = library()
FAULTS = sorted(CARDS.cards)


def session(faults=("stale_weights", "kl_sign_flipped"), seeds=(1, 2), **other):
    return Session(
        name="x",
        symptom="kl_divergence_increase",
        engine="local",
        source="checkpoint",
        checkpoint="embedded:qwen3_moe",
        build=BuildSpec("c", "o", 12),
        recipe=Recipe(),
        seeds=seeds,
        candidates=tuple(PlannedFault(f, 1.0, fault_spec(CARDS[f], 1.0, 5)) for f in faults),
        **other,
    )


@given(
    st.lists(st.sampled_from(FAULTS), unique=True, max_size=6),
    st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True),
)
def test_healthy_replays_come_first_and_seeds_go_round(faults, seeds):
    runs = plan_runs(session(faults, tuple(seeds)), Path("proxy"))
    assert len({run.id for run in runs}) == len(runs) == len(seeds) * (1 + len(faults))
    assert [run.seed for run in runs[: len(seeds)]] == seeds
    assert all(run.fault is None for run in runs[: len(seeds)])
    rest = runs[len(seeds) :]
    assert [(run.seed, run.fault) for run in rest] == [(seed, fault) for seed in seeds for fault in faults]


def test_run_ids_name_fault_strength_and_seed():
    planned = PlannedFault("stale_weights", 0.5, fault_spec(CARDS["stale_weights"], 0.5))
    runs = plan_runs(replace(session(), candidates=(planned,), seeds=(3,)), Path("proxy"))
    assert [run.id for run in runs] == ["healthy-s3", "stale_weights-x0.5-s3"]
    assert runs[1].spec.fault == planned.spec and runs[1].spec.model == "proxy"


def test_an_uncut_sibling_is_run_as_it_is():
    assert plan_runs(replace(session(), build=None), Path("proxy"))[0].spec.model == "embedded:qwen3_moe"


def test_a_session_survives_json():
    before = session(budget_s=3.5, onset=7, expect={"verdict": "reproduced"}, not_tried={"a": "b"})
    assert Session.from_json(json.loads(json.dumps(before.to_json()))) == before
    bare = replace(before, build=None)
    assert Session.from_json(json.loads(json.dumps(bare.to_json()))) == bare
    with pytest.raises(RunError, match="schema 99"):
        Session.from_json(before.to_json() | {"schema": 99})


def test_the_recipe_hash_ignores_the_seed_alone():
    assert recipe_hash(Recipe()) == recipe_hash(Recipe(data_seed=3))
    assert recipe_hash(Recipe()) != recipe_hash(Recipe(lr=1.0))


@pytest.mark.parametrize(
    ("onset", "twin", "expected"),
    [
        (None, True, (1, None)),
        (Onset(18, 22, True, {}), True, (20, None)),
        (Onset(18, 22, False, {}), True, (1, None)),  # crept in: it may have been active all along
        (Onset(38, 42, True, {}), True, (1, None)),  # a replay would not go far enough
        (Onset(18, 22, True, {}), False, (18, None)),
        (Onset(4, 6, True, {}), False, (1, None)),  # no past to speak of
        (Onset(300, 310, True, {}), False, (20, 300)),  # beyond the replay: a past of its own
    ],
)
def test_where_replays_are_injected(onset, twin, expected):
    run = Curves("x", np.arange(1.0, 501.0), {})
    assert injection_step(onset, [run], twin, 60) == expected


def test_visible_symptoms_follow_metric_and_direction():
    steps_N = np.arange(1.0, 41.0)
    up_N = np.where(steps_N >= 20, 1.0, 0.1)
    onset = Onset(20, 22, True, {"actor/kl_loss": (20, 22), "critic/rewards/mean": (20, 22)})
    run = Curves("x", steps_N, {"actor/kl_loss": up_N, "critic/rewards/mean": 1 - up_N})
    twin = Curves("y", steps_N, {"actor/kl_loss": up_N * 0 + 0.1, "critic/rewards/mean": up_N * 0 + 0.9})
    expected = {"kl_divergence_increase", "reward_degradation"}
    assert set(visible_symptoms(onset, [run], [])) == set(visible_symptoms(onset, [run], [twin])) == expected
    assert visible_symptoms(None, [run], [twin]) == ()


def test_a_witness_has_to_be_seen_in_every_seed():
    card = CARDS["stale_weights"]
    name, above = card.witness.name, card.witness.above
    assert judge_witness(card, [{name: above + 1, "x": 1}, {name: above + 2}]) == ({name: above + 1}, True)
    assert not judge_witness(card, [{name: above + 1}, {name: above}])[1]
    assert not judge_witness(card, [{name: above + 1}, {}])[1]
    assert not judge_witness(card, [{name: float("nan")}])[1]
    assert judge_witness(card, []) == ({}, False)


def result(verdict, status="completed"):
    return Result(status, Score(verdict, (), ()), "", "", {}, "", {}, (), {}, {}, 0.0, "")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.REPRODUCED, 0),
        (Verdict.REPRODUCED_NOT_SPECIFIC, 0),
        (Verdict.NO_FAULT, 0),
        (Verdict.PARTLY, 1),
        (Verdict.NOT_REPRODUCED, 1),
        (Verdict.INJECTION_FAILED, 4),
        (Verdict.INCONCLUSIVE, 5),
    ],
)
def test_exit_codes_follow_the_verdict_or_the_expectation(verdict, code):
    assert exit_code(result(verdict)) == code
    assert exit_code(result(verdict), {"verdict": verdict.value}) == ExitCode.OK
    assert exit_code(result(verdict), {"fault": "stale_weights"}) == ExitCode.NOT_REPRODUCED
    assert exit_code(result(verdict, "failed")) == ExitCode.RUN_FAILED
    assert exit_code(result(verdict, "interrupted"), {"verdict": verdict.value}) == ExitCode.INTERRUPTED


def test_the_resume_command_can_be_pasted():
    outputs = Outputs({"junit": Path("my report.xml")}, json=True)
    command = outputs.resume_command(RunFolder(Path("/a b/run")))
    assert command == "diagnose run --resume '/a b/run' --junit 'my report.xml' --json"


def test_recipe_settings_from_the_command_line():
    recipe = changed(Recipe(), ["lr=1e-3", "steps=7", "exact=true", "old_log_prob=trainer"])
    assert (recipe.lr, recipe.steps, recipe.exact, recipe.old_log_prob) == (1e-3, 7, True, "trainer")
    for wrong in ("speed=1", "lr=fast", "exact=perhaps", "steps"):
        with pytest.raises(DiagnoseError):
            changed(Recipe(), [wrong])


def test_look_alikes_of_the_likeliest_race_whatever_their_symptoms():
    prepared = prepare(Path("playbooks/reward_stalls.yaml"), Overrides())
    session = prepared.session
    faults = [item.fault for item in session.candidates]
    own = [fault for fault in faults if session.symptom in CARDS[fault].symptoms]
    named = {rival.fault for fault in own[:3] for rival in CARDS[fault].rivals}
    assert named and named <= {*faults, *session.not_tried}
    strangers = [fault for fault in faults if fault not in own]
    assert "stale_weights" in strangers and len(faults) == len(set(faults))
    chosen = prepare(Path("playbooks/reward_stalls.yaml"), Overrides(faults=tuple(faults[:2])))
    assert {item.fault for item in chosen.session.candidates} == set(faults[:2]), "nobody joins a choice"
