"""A fault is ruled out by a metric only where that metric is known to be as in a healthy run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import playbooks
from diagnose.curves import Array, Curves
from diagnose.logs import read
from diagnose.triage import assess, rank_faults
from taxonomy.assessment import Triage
from taxonomy.features import observe
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import Observation
from taxonomy.triage import rank

LOGS = Path(playbooks.__file__).parent / "logs"
N = 64
CLIPPING, BALANCING, KL = "gradient_clipping_off", "balancing_off", "kl_sign_flipped"
WITNESS = {
    CLIPPING: "actor/grad_norm",
    BALANCING: "routing/load_entropy/mean",
    KL: "actor/kl_loss",
    "completion_cap_too_short": "response_length/clip_ratio",
}
"""Faults, each with a metric that can rule it out."""


def recorded(name: str) -> tuple[Curves, list[Curves]]:
    """Return the incident of a shipped playbook and its healthy runs."""
    folder = LOGS / name
    incident, *healthy = (
        read(folder / f"{run}.jsonl").runs[-1].curves for run in ("incident", "healthy_1", "healthy_2")
    )
    return incident, healthy


def run(seed: int, **replaced: Array) -> Curves:
    """A run whose reward collapses unless it is replaced; everything else is as in its sisters but for noise."""
    rng = np.random.default_rng(seed)

    def around(level: float | Array, noise: float) -> Array:
        return np.asarray(level + noise * rng.standard_normal(N))

    u = np.arange(N) / N
    values = {
        "critic/rewards/mean": around(0.4 + 0.3 * u, 0.02),
        "actor/kl_loss": 10 ** around(-1.5 + 0.7 * u, 0.1),
        "actor/ppo_kl": around(0, 1e-3),
        "actor/grad_norm": 10 ** around(0.4, 0.1),
        "routing/load_entropy/mean": around(2.5, 0.03),
        "routing/load_max/mean": around(7, 0.3),
        "response_length/clip_ratio": np.clip(around(0.1, 0.01), 0, 1),
    }
    return Curves(
        "synthetic", np.arange(1.0, N + 1), values | {k.replace("__", "/"): v for k, v in replaced.items()}
    )


HEALTHY = [run(1), run(2)]


def same_as_healthy() -> dict[str, Array]:
    """The mean of the healthy runs: within whatever they vary by; the reward is lost, so that there is an incident."""
    mean = {name: (HEALTHY[0].values[name] + HEALTHY[1].values[name]) / 2 for name in HEALTHY[0].values}
    return mean | {"critic/rewards/mean": HEALTHY[0].values["critic/rewards/mean"] - 0.3}


def ruled_out(values: dict[str, Array], healthy: list[Curves] = HEALTHY) -> set[str]:
    """Return the faults that a run with these values is said not to have."""
    return by_log(assess([replace(run(0), values=values)], healthy))


def by_log(answer: Triage) -> set[str]:
    assert answer.verdict == "faulty"
    return {item.fault for item in answer.ruled_out if "as in a healthy run" in item.ruled_out}


def test_what_is_within_the_healthy_runs_rules_out() -> None:
    assert set(WITNESS) <= ruled_out(same_as_healthy())
    assert set(WITNESS) <= ruled_out(
        same_as_healthy() | {"actor/kl_loss": HEALTHY[0].values["actor/kl_loss"]}
    )


@pytest.mark.parametrize("fault", list(WITNESS))
@pytest.mark.parametrize("half", ["early", "late", "both"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_level_beside_the_healthy_ones_rules_nothing_out(fault: str, half: str, sign: int) -> None:
    """Whichever half is off, and whichever way: by three point noises."""
    name = WITNESS[fault]
    steps = np.arange(N)
    where = {"early": steps < N / 2, "late": steps >= N / 2, "both": steps >= 0}[half]
    values = same_as_healthy()
    old = values[name]
    if name in ("actor/grad_norm", "actor/kl_loss"):  # compared by their logarithm
        values[name] = np.where(where, old * 10 ** (0.3 * sign), old)
    else:
        values[name] = old + sign * where * {"routing/load_entropy/mean": 0.09}.get(name, 0.03)
    left = ruled_out(values)
    assert fault not in left
    assert set(WITNESS) - {fault} <= left, "the others are in order still"


def test_the_farther_off_a_metric_is_the_less_it_rules_out() -> None:
    """Once a fault is let off, a larger difference never rules it out again."""
    for sign in (-1, 1):
        row = []
        for by in np.linspace(0, 1, 21):
            values = same_as_healthy()
            values["actor/grad_norm"] = values["actor/grad_norm"] * 10 ** (sign * by)
            row.append(CLIPPING in ruled_out(values))
        assert row[0] and not row[-1] and row == sorted(row, reverse=True)


def test_single_steps_that_stand_out_rule_nothing_out() -> None:
    values = same_as_healthy()
    spikes = values["actor/grad_norm"].copy()
    spikes[[20, 41]] *= 8
    assert CLIPPING not in ruled_out(values | {"actor/grad_norm": spikes})


def test_another_metric_of_the_same_quantity_keeps_a_fault() -> None:
    values = same_as_healthy()
    off = values["routing/load_max/mean"] + 0.9
    seen = observe([replace(run(0), values=values | {"routing/load_max/mean": off})], HEALTHY)
    entropy = next(item for item in seen if item.metric == "routing/load_entropy/mean")
    assert entropy.direction == "none" and not entropy.doubt
    assert BALANCING not in ruled_out(values | {"routing/load_max/mean": off})


def test_a_kindred_symptom_keeps_a_fault() -> None:
    values = same_as_healthy()
    assert KL not in ruled_out(values | {"actor/ppo_kl": values["actor/ppo_kl"] + 0.1})


def test_one_seed_of_several_is_enough_to_doubt() -> None:
    values = same_as_healthy()
    calm = replace(run(0), values=values)
    other = replace(run(0), values=values | {"actor/grad_norm": values["actor/grad_norm"] * 10**0.15})
    assert CLIPPING in by_log(assess([calm], HEALTHY))
    for seeds in ([calm, other], [other, calm]):
        assert CLIPPING not in by_log(assess(seeds, HEALTHY))


def test_without_a_healthy_run_only_a_known_healthy_level_rules_out() -> None:
    values = same_as_healthy() | {"rollout_corr/logprob_abs_diff": np.full(N, 0.008)}
    values["critic/rewards/mean"] = np.where(np.arange(N) < 30, 0.5, 0.1) + 0.01 * np.sin(np.arange(N))
    left = ruled_out(values, [])
    assert "weight_sync_skipped" in left
    assert not left & set(WITNESS)


def test_doubt_costs_points_and_rules_nothing_out() -> None:
    reward = Observation("critic/rewards/mean", "down")
    calm = Observation("actor/grad_norm", "none", alarm=False, rule="twin")
    sure, doubtful, silent = (
        {item.fault: item for item in rank([reward, *more])}[CLIPPING]
        for more in ([calm], [replace(calm, doubt=True)], [])
    )
    assert sure.ruled_out and not doubtful.ruled_out
    assert doubtful.score < silent.score and any("does not" in reason for reason in doubtful.reasons)


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("rollout_gap", {BALANCING, "balancing_misscaled", "buffers_lost"}),
        (
            "kl_spike",
            {CLIPPING, "half_precision_gradients", BALANCING, "balancing_misscaled", "buffers_lost"},
        ),
        ("steady_gap", {CLIPPING, "half_precision_gradients", BALANCING}),
    ],
)
def test_the_shipped_incidents_rule_out_nothing_that_is_measured_otherwise(
    name: str, faults: set[str]
) -> None:
    """What runs of these faults show later (less load entropy, a lower gradient norm) is seen in the logs already."""
    incident, healthy = recorded(name)
    assert not faults & {item.fault for item in assess([incident], healthy).ruled_out}
    assert not faults & {item.fault for item in rank_faults([incident], healthy) if item.ruled_out}


def test_a_kl_that_climbs_is_what_the_incident_shows_first() -> None:
    """KL to reference at 2.3 nat against 0.14: the first symptom is about it, and not about a kindred metric."""
    incident, healthy = recorded("kl_spike")
    answer = assess([incident], healthy)
    assert (answer.symptoms[0].id, answer.symptoms[0].metric) == ("kl_divergence_increase", "actor/kl_loss")
    for item in observe([incident], healthy):
        told = "nothing stands out" not in item.evidence
        assert told or not METRIC_BY_NAME[item.metric].ranks, "what was compared is told as compared"


def test_a_difference_short_of_a_symptom_is_told_as_one() -> None:
    values = same_as_healthy()
    values["actor/grad_norm"] = values["actor/grad_norm"] * 10**0.15
    item = next(
        item
        for item in observe([replace(run(0), values=values)], HEALTHY)
        if item.metric == "actor/grad_norm"
    )
    assert item.direction == "none" and item.doubt and not item.alarm
    assert "too small to be sure of" in item.evidence and "nothing stands out" not in item.evidence
