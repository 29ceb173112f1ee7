"""Ranking by one additive rule; the incidents and negatives of tests/fixtures/cases hold its bars."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import diagnose
import taxonomy
from bench.triage import cases, judge, place, right
from taxonomy.assessment import assess, possible_by_facts
from taxonomy.clues import BadClue, Sign, _clues, all_clues
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import QUANTITY, BadObservation, Observation, parse_observation
from taxonomy.registry import library
from taxonomy.triage import TIE, expected_signs, rank

FIXTURES = Path(__file__).parent.parent / "fixtures" / "cases"
FROZEN = {
    "observations.yaml": "bc5c68bef77273d03978b37b52a725eb7a2a1162bfc148673bb773b79d20332f",
    "answers.yaml": "6939dde65363b70674e497a29e62377a05dab98c35d0ce61a0f138aea5588586",
}
GAP_AT_START = Observation("rollout_corr/logprob_abs_diff", "up", "start")


def test_the_incidents_are_as_they_were_written_down_first() -> None:
    for name, wanted in FROZEN.items():
        assert hashlib.sha256((FIXTURES / name).read_bytes()).hexdigest() == wanted, name


def test_bars_of_the_incidents() -> None:
    confirmed = [case for case in cases() if case.confirmed]
    assert len(confirmed) == 13
    assert sum(map(right, confirmed)) >= 11
    assert all(1 <= place(judge(case), case.faults)[0] <= 3 for case in confirmed)


def test_nothing_is_invented_for_the_negatives() -> None:
    for case in cases():
        if case.verdict != "faulty":
            answer = judge(case)
            assert (answer.verdict, answer.candidates) == (case.verdict, ()), case.id


def test_the_wording_of_the_incidents_is_not_in_the_code() -> None:
    known = set((FIXTURES / "wording.txt").read_text(encoding="utf-8").split("\n")[1:])
    folders = [Path(str(package.__file__)).parent for package in (taxonomy, diagnose)]
    for file in sorted(
        file for folder in folders for file in (*folder.rglob("*.py"), *folder.rglob("*.yaml"))
    ):
        words = re.findall(r"[a-z0-9]+", file.read_text(encoding="utf-8").lower())
        for i in range(len(words) - 3):
            four = " ".join(words[i : i + 4])
            assert hashlib.sha256(four.encode()).hexdigest()[:10] not in known, f"{file.name}: {four}"


def test_every_card_has_clues_and_every_clue_a_card() -> None:
    assert set(all_clues()) == set(library().cards)


def test_bad_clues_are_refused() -> None:
    for raw in (
        {"signs": [{"of": "gap", "is": "sideways"}]},
        {"signs": [{"of": "nothing", "is": "up"}]},
        {"signs": [{"of": "gap", "is": "up", "when": "someday"}]},
        {"phase": "later"},
        {"requires": ["mood"]},
        {"need": {}},
    ):
        with pytest.raises(BadClue):
            _clues("x", raw)


def test_before_the_first_update_no_sync_can_be_missing() -> None:
    late = Observation("rollout_corr/logprob_abs_diff", "up", "update")
    score = {
        when: {item.fault: item.score for item in rank([seen])}
        for when, seen in (("start", GAP_AT_START), ("update", late))
    }
    assert score["update"]["weight_sync_skipped"] > score["start"]["weight_sync_skipped"] + 2
    assert score["start"]["weight_conversion_error"] > score["update"]["weight_conversion_error"]


def test_context_rules_out_with_its_reason() -> None:
    dense = {
        item.fault: item
        for item in rank([GAP_AT_START], {"model.name": "Qwen/Qwen3-4B", "weights.equal": True})
    }
    assert dense["top_k_mismatch"].ruled_out and "model.moe" in dense["top_k_mismatch"].ruled_out
    assert dense["weight_sync_skipped"].ruled_out
    assert not dense["logprob_shift"].ruled_out
    assert possible_by_facts("top_k_mismatch", {"model.moe": False})
    assert not possible_by_facts("top_k_mismatch", {"model.moe": True})


def test_a_single_process_has_no_tensor_parallel_fault() -> None:
    found = {item.fault: item for item in rank([GAP_AT_START], {"trainer.tensor_parallel": 1})}
    assert found["tensor_parallel_numerics"].ruled_out


def test_absence_is_evidence() -> None:
    reward = Observation("critic/rewards/mean", "flat")
    calm = Observation("rollout_corr/logprob_abs_diff", "none", alarm=False)
    found = {item.fault: item for item in rank([reward, calm])}
    assert "as in a healthy run" in found["weight_sync_skipped"].ruled_out
    assert not found["actor_update_omission"].ruled_out


def test_what_is_tied_is_within_reach_of_the_first() -> None:
    ranked = [item for item in rank([GAP_AT_START]) if not item.ruled_out]
    assert all((item.score >= ranked[0].score - TIE) == item.tied for item in ranked)
    assert [item.score for item in ranked] == sorted((item.score for item in ranked), reverse=True)
    for item in ranked:
        points = sum(float(reason.split()[0]) for reason in item.reasons)
        assert abs(points - item.score) < 0.05 * max(1, len(item.reasons)), "the reasons add up to the score"


def test_metrics_of_one_quantity_speak_once() -> None:
    twice = [GAP_AT_START, Observation("training/rollout_probs_diff_mean", "up", "start")]
    assert [(i.fault, i.score) for i in rank(twice)] == [(i.fault, i.score) for i in rank([GAP_AT_START])]
    corr = Observation("training/rollout_actor_probs_pearson_corr", "down", "start")
    assert corr.sense == "up"
    assert set(QUANTITY) <= set(METRIC_BY_NAME)


def test_a_clue_stands_above_the_signature() -> None:
    card = library()["weight_sync_skipped"]
    signs = expected_signs(card, all_clues()[card.id])
    assert "update" in signs["gap"].when
    assert signs["step"] == Sign("step", "up", ("gradual",), weight=1)


def test_too_few_steps_and_nan() -> None:
    few = assess([Observation("critic/rewards/mean", "down")], steps=2)
    assert few.verdict == "inconclusive" and "too few steps: 2" in few.reason and not few.candidates
    nan = [Observation(m, "nan", "sudden", exact=True) for m in ("actor/pg_loss", "actor/grad_norm")]
    assert assess(nan, steps=1).verdict == "faulty"
    assert assess([]).verdict == "inconclusive"


def test_static_checks_are_told_even_where_the_log_is_healthy() -> None:
    facts = {"rollout.temperature": 0.6, "rollout.logprobs_mode": "raw_logprobs"}
    calm = assess([Observation("critic/rewards/mean", "up", "gradual")], facts)
    assert calm.verdict == "healthy"
    assert [item.fault for item in calm.findings] == ["rollout_temperature_missing"]
    top = assess([GAP_AT_START], facts).likeliest
    assert [item.fault for item in top] == ["rollout_temperature_missing"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "actor/kl_loss",
        "actor/kl_loss=",
        "actor/kl_loss=sideways",
        "actor/kl=up",
        "actor/kl_loss=up:never",
        "=up",
    ],
)
def test_bad_observations(text: str) -> None:
    with pytest.raises(BadObservation):
        parse_observation(text)


def test_observations_as_typed() -> None:
    item = parse_observation("actor/kl_loss=up:gradual:spikes")
    assert (item.metric, item.direction, item.onset, item.pattern) == (
        "actor/kl_loss",
        "up",
        "gradual",
        "spikes",
    )
    assert parse_observation("actor/kl_loss=nan:120").interval == (120, 120)
    with pytest.raises(BadObservation, match="did you mean actor/kl_loss"):
        parse_observation("actor/kl_los=up")


@pytest.mark.parametrize(
    ("fault", "direct"),
    [
        ("stale_weights", Observation("rollout/weight_lag", "up", "immediate")),
        ("attention_breaks_when_long", Observation("rollout_corr/late_gap", "up", "immediate")),
        ("batch_variant_kernels", Observation("actor/first_ratio_deviation", "up", "start")),
    ],
)
def test_what_shows_a_gap_directly_is_above_its_average(fault: str, direct: Observation) -> None:
    """The log cannot show a symptom of a fault and rule it out by the average of the same thing."""
    calm = Observation("rollout_corr/rollout_is_mean", "none", value=0.999, alarm=False, rule="level")
    by_id = {item.fault: item for item in rank([calm])}
    assert "is as in a healthy run" in by_id[fault].ruled_out
    by_id = {item.fault: item for item in rank([calm, direct])}
    assert not by_id[fault].ruled_out
    assert "is as in a healthy run" in by_id["weight_conversion_error"].ruled_out, (
        "others are ruled out as before"
    )
