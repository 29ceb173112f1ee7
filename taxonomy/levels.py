"""Level rules: what no healthy run shows, whatever came before. All that can be said of a log without a past.

Each limit has its source. A rule looks at one run; none of them knows about faults.

Legend of shape suffixes: ``_N`` logged steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from taxonomy.facts import Facts, holds
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import Observation

Array = NDArray[np.float64]

MIN_EXACT = 4
"""Steps at which a metric must be exactly 0 or constant before that is called a state and no accident."""
STRETCH = 8
"""The same for a stretch in the middle of a run."""
HUGE = 1e100
"""Size beyond which a value is as good as infinite; its square is still a number."""


class Log(Protocol):
    """One training run, as `diagnose.curves.Curves` gives it."""

    @property
    def steps_N(self) -> Array:
        """Logged steps, increasing."""

    @property
    def values(self) -> Mapping[str, Array]:
        """Canonical metric → values_N, NaN where not logged or not finite."""

    @property
    def nonfinite(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical metric → steps at which it was logged as not finite."""

    @property
    def resolution(self) -> Mapping[str, float]:
        """Canonical metric → last printed digit, for logs that round."""


@dataclass(frozen=True)
class Limit:
    """The range that a metric of the rollout–trainer gap has in healthy runs.

    Attributes:
        alarm: Level that no healthy system has.
        usual: Level up to which healthy systems in bf16 are found; a gap that stays below is called healthy.
        above: Whether large values are the bad ones.
        source: Where both come from.
        neutral: Value of a system without any gap.
    """

    alarm: float
    usual: float
    above: bool
    source: str
    neutral: float = 0.0


_FLOOR = "healthy bf16 systems show 1e-3 to 1e-2 in log-probability"
GAP_LIMITS = {
    "rollout_corr/logprob_abs_diff": Limit(
        0.1, 0.02, True, "the healthy arm of TRL issue 5312 stays under 0.02"
    ),
    "training/rollout_probs_diff_mean": Limit(0.1, 0.01, True, _FLOOR),
    "rollout_corr/log_ppl_abs_diff": Limit(0.1, 0.02, True, _FLOOR),
    "rollout_corr/k3_kl": Limit(
        0.1, 1e-3, True, "the healthy first step of XTuner pull request 2044 is well under 1e-3"
    ),
    "rollout_corr/kl": Limit(0.1, 2e-3, True, _FLOOR),
    "rollout_corr/mult_prob_error": Limit(
        1.1, 1.02, True, "NeMo-RL's guide to DTensor accuracy watches 1.05", neutral=1.0
    ),
    "rollout_corr/rollout_is_mean": Limit(
        0.5, 0.95, False, "ratios of equal policies average 1; half of it is another policy", neutral=1.0
    ),
    "training/rollout_actor_probs_pearson_corr": Limit(0.9, 0.99, False, _FLOOR, neutral=1.0),
}


def finite(log: Log, metric: str) -> tuple[Array, Array]:
    """Return (steps, values) of the finite values of a metric, those beyond `HUGE` as ±`HUGE`."""
    values_N = log.values.get(metric)
    if values_N is None:
        return np.empty(0), np.empty(0)
    known_N = np.isfinite(values_N)
    return log.steps_N[known_N], np.clip(values_N[known_N], -HUGE, HUGE)


def median(values: Array) -> float:
    """Return the median, NaN without values."""
    return float(np.median(values)) if len(values) else float("nan")


def late(values: Array) -> Array:
    """Return the second half."""
    return values[len(values) // 2 :]


def rises(log: Log, metric: str = "critic/rewards/mean") -> bool | None:
    """Return whether a metric ends above its first quarter by more than its own noise; None where that is unknown."""
    _, values = finite(log, metric)
    if len(values) < 8:
        return None
    early = values[: max(len(values) // 4, 2)]
    noise = float(np.median(np.abs(np.diff(values)))) if len(values) > 2 else 0.0
    return bool(median(late(values)) > median(early) + max(noise, METRIC_BY_NAME[metric].floor))


def not_finite(log: Log, facts: Facts) -> Iterator[Observation]:
    """Yield metrics that were logged as NaN or infinite.

    A division by an empty mask (KL over truncated responses that are masked) is cosmetic: loss and gradient stay
    finite at those very steps, and nothing is called wrong.
    """
    core = {
        step
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/loss")
        for step in log.nonfinite.get(name, ())
    }
    cores_logged = any(name in log.values for name in ("actor/grad_norm", "actor/pg_loss", "actor/loss"))
    for metric, steps in log.nonfinite.items():
        if not METRIC_BY_NAME[metric].ranks and metric != "actor/loss":
            continue
        real = [step for step in steps if step in core or not cores_logged]
        if metric == "rollout_corr/rollout_is_mean" or metric.startswith("val-core"):
            real = []
        first = (real or list(steps))[0]
        count = len(steps)
        at_start = first <= log.steps_N[0]
        lasting = count > 1 and steps[-1] >= log.steps_N[-1]
        alone = bool(real) and count == 1 and log.steps_N[-1] > first  # one skipped step of an fp16 scaler
        total = len(log.steps_N)
        what = f"not finite at {count} of {total} steps, first at" if total > 1 else "not finite at the only"
        what += f" step {first}"
        if not real:
            what += "; loss and gradient are finite at those steps: an empty mask, not a fault"
        yield Observation(
            metric,
            "nan",
            "start" if at_start else "sudden",
            "" if lasting or count == 1 else "spikes",
            (first, first),
            evidence=what,
            alarm=bool(real) and not alone,
            exact=True,
            rule="not_finite",
        )


def exact_zeros(log: Log, facts: Facts) -> Iterator[Observation]:
    """Yield metrics that are exactly 0 where they can't be: KL to the reference, gradient norm, loss."""
    for metric, what in (
        ("actor/kl_loss", "KL to the reference is exactly 0: the policy has not moved at all"),
        ("actor/grad_norm", "gradient norm is exactly 0: nothing reaches the weights"),
        ("actor/pg_loss", "policy loss is exactly 0"),
        ("response_length/spread", "all responses have the same length"),
    ):
        steps, values = finite(log, metric)
        if metric == "actor/kl_loss":
            steps, values = steps[1:], values[1:]  # before the first update it is 0 in every run
        if not len(values) or metric in log.resolution:
            continue
        zeros = np.flatnonzero(values == 0)
        if len(zeros) < max(0.5 * len(values), 1) or (
            metric != "actor/grad_norm" and len(zeros) < len(values)
        ):
            continue
        if metric == "actor/kl_loss" and holds(0, facts.get("actor.kl_coef", "?")):
            continue
        # TRL prints a loss that is 0 by construction (equal policies, centred advantages) with four decimals.
        alarm = metric in ("actor/kl_loss", "actor/grad_norm")
        first = int(steps[zeros[0]])
        yield Observation(
            metric,
            "zero",
            "start" if first <= log.steps_N[0] + 1 else "sudden",
            "" if len(zeros) == len(values) else "often",
            (first, first),
            0.0,
            evidence=f"{what} ({len(zeros)} of {len(values)} values)",
            alarm=alarm and len(zeros) >= MIN_EXACT,
            exact=True,
            rule="exact_zero",
        )


def gap_levels(log: Log, facts: Facts) -> Iterator[Observation]:
    """Yield gaps between rollout and trainer that no healthy system has, or that are as healthy ones."""
    for metric, limit in GAP_LIMITS.items():
        steps, values = finite(log, metric)
        if not len(values):
            continue
        sign = 1.0 if limit.above else -1.0
        bad = sign * (np.abs(values) if metric == "rollout_corr/kl" else values) > sign * limit.alarm
        level = median(late(values))
        if bad[len(bad) // 2 :].mean() > 0.5:
            first = int(steps[np.flatnonzero(bad)[0]])
            at_start = (
                bool(bad[0]) and steps[0] <= log.steps_N[0] + 1
            )  # an evaluation may be logged before step 1
            alone = len(log.steps_N) == 1  # the last words of a run say nothing about when it began
            yield Observation(
                metric,
                "up" if limit.above else "down",
                "" if alone else "start" if at_start else "sudden",
                interval=None if alone else (first, first),
                value=level,
                evidence=f"{level:.3g}: healthy systems stay {'below' if limit.above else 'above'} {limit.alarm:g}",
                rule="level",
            )
        elif np.all(sign * np.abs(values) <= sign * limit.usual):
            yield Observation(
                metric,
                "none",
                value=level,
                evidence=f"{level:.3g}, a healthy level",
                alarm=False,
                rule="level",
            )


FULL = 0.95
"""Share from which on "all of them" is meant."""
_FULL = (
    ("response_length/clip_ratio", "truncated", "responses are cut off at the cap"),
    ("rollout/zero_std_groups", "no_signal", "groups have one reward only: no advantage is left"),
)


def stuck(log: Log, facts: Facts) -> Iterator[Observation]:
    """Yield what is stuck: truncation of everything, groups without a signal, a reward that is one number."""
    improves = rises(log)
    for metric, rule, words in _FULL:
        _, shares = finite(log, metric)
        level = median(late(shares))
        if len(shares) >= MIN_EXACT and level >= FULL and not improves:
            yield Observation(
                metric,
                "up",
                "start" if shares[0] >= FULL else "gradual",
                value=level,
                evidence=f"{level:.0%} of the {words}",
                rule=rule,
            )
    yield from _constant(log, improves)


def _constant(log: Log, improves: bool | None) -> Iterator[Observation]:
    """Yield rewards that are one number, for good or for a long stretch, and not because everything is right."""
    for metric in ("critic/rewards/mean", "val-core/reward/mean"):
        steps, values = finite(log, metric)
        if len(values) < MIN_EXACT or improves or (metric in log.resolution and not values.any()):
            continue
        starts = np.flatnonzero(np.concatenate([[True], np.diff(values) != 0]))
        lengths = np.diff(np.concatenate([starts, [len(values)]]))
        longest = int(lengths.argmax())
        first, count = int(starts[longest]), int(lengths[longest])
        level = float(values[first])
        lasting = first + count == len(values) and count >= max(MIN_EXACT, len(values) / 2)
        if not lasting and count < STRETCH:
            continue
        if level > values[0] and level >= values.max():
            continue  # the best there is, reached and held
        yield Observation(
            metric,
            "constant",
            "start" if first == 0 else "immediate" if first <= 2 else "sudden",
            interval=(int(steps[max(first - 1, 0)]), int(steps[first])),
            value=level,
            evidence=f"exactly {level:g} at {count} logged steps in a row, from step {int(steps[first])} on",
            rule="constant",
        )


RULES = (not_finite, exact_zeros, gap_levels, stuck)


def level_observations(log: Log, facts: Facts) -> list[Observation]:
    """Return what the level rules say of one run."""
    return [item for rule in RULES for item in rule(log, facts)]
