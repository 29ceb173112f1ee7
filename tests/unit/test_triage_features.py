"""What a log shows by itself: healthy drift is no symptom, and what no healthy run does is one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t

from diagnose.curves import Array, Curves
from taxonomy.changes import t_quantile
from taxonomy.features import observe
from taxonomy.losses import change_point
from taxonomy.observations import Observation

N = 80


def healthy(seed: int, n: int = N) -> Curves:
    """A run that learns: reward and KL rise, entropy falls, lengths change, everything else holds."""
    rng = np.random.default_rng(seed)
    u = np.arange(n) / n

    def around(level: Array | float, noise: float) -> Array:
        return np.asarray(level + noise * rng.standard_normal(n))

    values = {
        "critic/rewards/mean": around(0.4 + 0.3 * (1 - np.exp(-4 * u)), 0.03),
        "actor/kl_loss": np.abs(around(0.01 + 0.2 * u, 0.01)) + 1e-4,
        "actor/entropy": around(0.6 - 0.35 * u, 0.02),
        "actor/grad_norm": np.abs(around(2 + u, 0.4)) + 0.1,
        "actor/pg_loss": around(0, 0.01),
        "actor/pg_clipfrac": np.abs(around(0.002, 0.002)),
        "training/rollout_probs_diff_mean": np.abs(around(0.003, 4e-4)),
        "rollout_corr/logprob_abs_diff": np.abs(around(0.008, 1e-3)),
        "rollout_corr/k3_kl": np.abs(around(3e-4, 1e-4)),
        "response_length/mean": around(300 - 60 * u, 8),
        "response_length/clip_ratio": np.clip(around(0.05, 0.01), 0, 1),
        "rollout/zero_std_groups": np.clip(around(0.1 + 0.3 * u, 0.05), 0, 1),
    }
    return Curves("synthetic", np.arange(1.0, n + 1), values)


def changed(run: Curves, **values: Array) -> Curves:
    """Replace metrics; `__` stands for `/`."""
    return replace(run, values=dict(run.values) | {key.replace("__", "/"): v for key, v in values.items()})


def broken(run: Curves, metrics: tuple[str, ...], steps: tuple[int, ...]) -> Curves:
    """Make metrics NaN at steps."""
    values = dict(run.values)
    for name in metrics:
        values[name] = np.where(np.isin(run.steps_N, steps), np.nan, values[name])
    return replace(run, values=values, nonfinite=dict.fromkeys(metrics, steps))


def alarm(runs: Curves, metric: str, *twins: Curves) -> Observation | None:
    return next((item for item in observe([runs], twins) if item.alarm and item.metric == metric), None)


def test_healthy_runs_raise_no_alarm() -> None:
    found = [[o.metric for o in observe([healthy(seed)]) if o.alarm] for seed in range(40)]
    found += [[o.metric for o in observe([healthy(s)], [healthy(s + 500)]) if o.alarm] for s in range(40)]
    assert sum(map(bool, found)) <= 1, found


@pytest.mark.parametrize("step", [30, 55])
def test_a_jump_is_found_where_it_is(step: int) -> None:
    run = healthy(1)
    gap = run.values["training/rollout_probs_diff_mean"] + 0.05 * (run.steps_N >= step)
    found = alarm(changed(run, training__rollout_probs_diff_mean=gap), "training/rollout_probs_diff_mean")
    assert found is not None and found.interval is not None
    assert (found.direction, found.onset) == ("up", "sudden")
    assert found.interval[0] <= step <= found.interval[1] and found.interval[1] - found.interval[0] < 15


def test_the_first_step_counts_as_the_start() -> None:
    run = healthy(2)
    found = alarm(
        changed(run, rollout_corr__logprob_abs_diff=np.full(N, 0.4)), "rollout_corr/logprob_abs_diff"
    )
    assert found is not None and found.onset == "start"


def test_a_gap_that_grows_is_gradual() -> None:
    run = healthy(3)
    gap = run.values["training/rollout_probs_diff_mean"] * np.linspace(1, 15, N)
    found = alarm(changed(run, training__rollout_probs_diff_mean=gap), "training/rollout_probs_diff_mean")
    assert found is not None and found.direction == "up" and found.onset in ("gradual", "delayed")


def test_nan_in_loss_and_gradient_is_an_alarm_and_nan_in_kl_alone_is_cosmetic() -> None:
    run = healthy(4)
    steps = tuple(range(40, N + 1))
    bad = broken(run, ("actor/kl_loss", "actor/pg_loss", "actor/grad_norm"), steps)
    found = alarm(bad, "actor/grad_norm")
    assert found is not None and (found.direction, found.interval) == ("nan", (40, 40))
    assert alarm(broken(run, ("actor/kl_loss",), (12, 33, 50)), "actor/kl_loss") is None


def test_exact_zeros() -> None:
    run = healthy(5)
    assert alarm(changed(run, actor__kl_loss=np.zeros(N)), "actor/kl_loss") is not None
    assert alarm(changed(run, actor__grad_norm=np.zeros(N)), "actor/grad_norm") is not None
    rounded = replace(changed(run, actor__kl_loss=np.zeros(N)), resolution={"actor/kl_loss": 1e-3})
    assert alarm(rounded, "actor/kl_loss") is None, "a rounded 0 is a small number"
    first = np.where(np.arange(N) == 0, 0.0, run.values["actor/kl_loss"])
    assert alarm(changed(run, actor__kl_loss=first), "actor/kl_loss") is None, "0 before the first update"
    no_term = observe([changed(run, actor__kl_loss=np.zeros(N))], facts={"actor.kl_coef": 0})
    assert not [item for item in no_term if item.alarm]


def test_a_loss_of_zero_is_no_alarm_by_itself() -> None:
    """With equal policies and centred advantages it is 0 by construction, and TRL prints four decimals."""
    assert alarm(changed(healthy(6), actor__pg_loss=np.zeros(N)), "actor/pg_loss") is None


def test_a_reward_that_is_lost_or_stuck() -> None:
    run = healthy(7)
    u = np.arange(N) / N
    lost = run.values["critic/rewards/mean"] - 0.6 * np.clip(u - 0.5, 0, 1)
    found = alarm(changed(run, critic__rewards__mean=lost), "critic/rewards/mean")
    assert found is not None and found.direction == "down"
    found = alarm(changed(run, critic__rewards__mean=np.full(N, 0.25)), "critic/rewards/mean")
    assert found is not None and found.direction == "constant"
    solved = np.clip(0.4 + 1.5 * u, 0, 1)
    assert alarm(changed(run, critic__rewards__mean=solved), "critic/rewards/mean") is None


def test_a_kl_that_runs_away_for_nothing_and_one_that_buys_reward() -> None:
    run = healthy(8)
    away = np.geomspace(0.002, 3.0, N)
    flat = np.full(N, 0.5) + 0.02 * np.sin(np.arange(N))
    assert alarm(changed(run, actor__kl_loss=away, critic__rewards__mean=flat), "actor/kl_loss") is not None
    assert alarm(changed(run, actor__kl_loss=away), "actor/kl_loss") is None


def test_what_a_run_loses_counts_beside_a_twin_too_unless_the_twin_loses_it() -> None:
    """A twin whose KL is restless has wide margins: they must not hide a KL that is out of hand."""
    flat = np.full(N, 0.5) + 0.02 * np.sin(np.arange(N))
    away = changed(healthy(8), actor__kl_loss=np.geomspace(0.002, 3.0, N), critic__rewards__mean=flat)
    restless = changed(healthy(9), actor__kl_loss=0.05 * 10 ** np.where(np.arange(N) // 8 % 2, 0.9, -0.9))
    found = alarm(away, "actor/kl_loss", restless)
    assert found is not None and found.rule == "kl_runaway"
    alike = alarm(away, "actor/kl_loss", away)
    assert alike is None


def test_against_a_twin_a_steady_difference_shows() -> None:
    run, twin = healthy(9), healthy(10)
    worse = changed(run, critic__rewards__mean=run.values["critic/rewards/mean"] - 0.25)
    found = alarm(worse, "critic/rewards/mean", twin)
    assert found is not None and (found.direction, found.onset) == ("down", "immediate")
    same = [item.direction for item in observe([run], [twin]) if item.metric == "critic/rewards/mean"]
    assert same == ["none"]
    better = changed(run, critic__rewards__mean=run.values["critic/rewards/mean"] + 0.25)
    assert alarm(better, "critic/rewards/mean", twin) is None


def test_little_is_said_of_little() -> None:
    short = Curves("short", np.array([1.0, 2.0]), {"critic/rewards/mean": np.array([0.5, 0.1])})
    assert not [item for item in observe([short]) if item.alarm]
    assert observe([short], [healthy(1)]) == observe([short])
    assert observe([]) == ()


@pytest.mark.parametrize("dof", [8, 12, 30])
@pytest.mark.parametrize("upper", [0.05, 1e-3, 1e-5])
def test_t_quantile_against_scipy(upper: float, dof: float) -> None:
    assert math.isclose(t_quantile(upper, dof), float(t.isf(upper, dof)), rel_tol=0.01)


def test_change_point() -> None:
    steps = np.arange(1.0, 61)
    noise = 0.05 * np.random.default_rng(0).standard_normal(60)
    interval, at_once = change_point(steps, (steps >= 21) + noise)
    assert at_once and interval == (21, 21)
    _, at_once = change_point(steps, steps / 60 + noise)
    assert not at_once
