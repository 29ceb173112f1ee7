"""Features: everything that triage needs to know of a log, as observations.

What no healthy run shows (`taxonomy.levels`), and what a run loses or lets grow (`taxonomy.losses`) where its healthy
twins don't. With twins: how it differs from them. Without: a jump away from its own past (`taxonomy.changes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from taxonomy.changes import jumps, wiggle
from taxonomy.facts import Facts
from taxonomy.levels import Log, finite, late, level_observations, median, rises
from taxonomy.losses import losses
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import QUANTITY, UNCLEAR, Observation
from taxonomy.twins import against_twins

_STILL = (
    "actor/grad_norm",
    "response_length/clip_ratio",
    "rollout/zero_std_groups",
    "routing/agreement/mean",
)
_RANK = {
    "not_finite": 5,
    "exact_zero": 5,
    "constant": 4,
    "truncated": 4,
    "no_signal": 4,
    "twin": 3,
    "level": 2,
}


def observe(
    runs: Sequence[Log], healthy: Sequence[Log] = (), facts: Facts | None = None
) -> tuple[Observation, ...]:
    """Return what the logs of an incident show, one observation a metric, symptoms first.

    Args:
        runs: Logs of the incident (several: seeds of it).
        healthy: Logs of healthy twins.
        facts: What is known of the run.
    """
    found = [item for run in runs for item in _of_run(run, healthy, facts or {})]
    best: dict[str, Observation] = {}
    for item in found:
        known = best.get(item.metric)
        if known is None or _priority(item) > _priority(known):
            best[item.metric] = item
    doubted = {item.metric for item in found if item.doubt or item.direction != "none"}
    if healthy:  # the healthy runs decide what is healthy here; what can't be compared with them stays open
        compared = {item.metric for item in found if item.rule == "twin"}
        doubted |= {
            name for name in best if name not in compared and all(name in twin.values for twin in healthy)
        }
    else:
        _revise_reward(best, runs)
    best = {
        name: replace(item, doubt=item.direction == "none" and name in doubted) for name, item in best.items()
    }
    return tuple(sorted(best.values(), key=lambda item: (not item.alarm, _start(item))))


def _revise_reward(best: dict[str, Observation], runs: Sequence[Log]) -> None:
    """Judge a reward that only rose before the incident by what it does since."""
    name = "critic/rewards/mean"
    onset = min((item.interval[1] for item in best.values() if item.alarm and item.interval), default=None)
    if (
        onset is None
        or name not in best
        or best[name].alarm
        or len(runs) != 1
        or onset <= runs[0].steps_N[0] + 1
    ):
        return
    steps, values = finite(runs[0], name)
    since = values[steps >= onset]
    if len(since) < 8 or len(since) > 0.9 * len(values):
        return
    noise = max(wiggle(since), METRIC_BY_NAME[name].floor)
    half = len(since) // 2
    goes_on = median(since[half:]) > median(since[:half]) + noise / 2
    best[name] = replace(
        best[name],
        direction="none" if goes_on else "flat",
        evidence="goes on rising" if goes_on else f"does not rise since step {onset}",
    )


def _priority(item: Observation) -> tuple[bool, bool, int]:
    """What is exact and alarming wins; among the rest, the better-founded rule.

    A level says when it was reached, a jump or a growth when it began: the level only comes first where it was there
    from the first step.
    """
    later = item.rule == "level" and item.onset != "start"
    return item.exact and item.alarm, item.alarm, 0 if later and item.alarm else _RANK.get(item.rule, 1)


def _start(item: Observation) -> float:
    return float(item.interval[1]) if item.interval else float("inf")


def _of_run(run: Log, healthy: Sequence[Log], facts: Facts) -> Iterator[Observation]:
    yield from level_observations(run, facts)
    if healthy:
        yield from against_twins(run, healthy)
        usual = {item.metric for twin in healthy for item in losses(twin)}
        yield from (item for item in losses(run) if item.metric not in usual)
    else:
        yield from jumps(run)
        yield from losses(run)
        yield from _ordinary(run)
    yield from _unclear(run)


def _unclear(run: Log) -> Iterator[Observation]:
    """Yield, at the lowest priority, what was logged and shows nothing: weak evidence against what would move it."""
    for name in run.values:
        _, values = finite(run, name)
        if len(values) >= 8 and name in QUANTITY:
            level = median(late(values))
            yield Observation(
                name,
                "none",
                value=level,
                evidence=f"{level:.3g}: nothing stands out",
                alarm=False,
                rule=UNCLEAR,
            )


def _ordinary(run: Log) -> Iterator[Observation]:
    """Yield what is as it should be, as far as a log without a twin can say so: evidence against many faults.

    It rules none of them out: how large this recipe's gradient norm, KL or truncated share is when healthy, only a
    healthy run of it can tell.
    """
    improves = rises(run)
    steps, reward = finite(run, "critic/rewards/mean")
    if improves is not None and len(reward) >= 16:
        yield Observation(
            "critic/rewards/mean",
            "none" if improves else "flat",
            value=median(late(reward)),
            healthy=median(reward[: max(len(reward) // 4, 2)]),
            evidence="rises, as in a healthy run" if improves else "does not rise",
            alarm=False,
            rule="ordinary",
        )
    for name in _STILL:
        steps, values = finite(run, name)
        if len(values) < 8 or len(steps) < len(run.steps_N) / 2:
            continue
        level, spread = median(values), float(np.ptp(values))
        unusual = {"response_length/clip_ratio": level > 0.5, "rollout/zero_std_groups": level > 0.8}.get(
            name, False
        )
        limit = (
            5 * abs(level) if name == "actor/grad_norm" else 0.3 if name != "routing/agreement/mean" else 0.02
        )
        if spread <= max(limit, METRIC_BY_NAME[name].floor) and level != 0 and not unusual:
            yield Observation(
                name,
                "none",
                value=level,
                evidence=f"stays near {level:.3g}",
                alarm=False,
                rule="ordinary",
                doubt=True,
            )
    _, kl = finite(run, "actor/kl_loss")
    if len(kl) >= 8 and 0 < median(late(kl)) < 0.5:
        yield Observation(
            "actor/kl_loss",
            "none",
            value=median(late(kl)),
            evidence=f"{median(late(kl)):.3g}, neither 0 nor out of hand",
            alarm=False,
            rule="ordinary",
            doubt=True,
        )
