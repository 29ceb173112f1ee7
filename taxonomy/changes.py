"""Changes: jumps of a run away from what it did before.

Healthy training drifts (the reward rises, the KL rises, the entropy falls, lengths change), so that a trend alone is
never a symptom. Healthy runs don't jump. Medians of blocks are compared, never points.

Legend of shape suffixes: ``_B`` blocks, ``_M`` metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from taxonomy.levels import GAP_LIMITS, Array, Log, finite, median, rises
from taxonomy.metrics import METRICS, Metric
from taxonomy.observations import QUANTITY, Observation

MIN_POINTS = 16
"""Logged points under which no block median means anything."""


HEAVY = {"rollout_corr/k3_kl": 5.0}
"""Factor on the healthy level of metrics with heavy tails: one token in ten thousand makes a block of it."""


@dataclass(frozen=True)
class Margins:
    """Thresholds of the comparisons; all in noise units unless said otherwise.

    Attributes:
        jump_alpha: Chance of a false jump against the own past, over all metrics and blocks.
        jump_inflation: Factor for slow noise, which moves three blocks farther than two neighbours differ.
        prior_dof: Degrees of freedom that the metrics' common noise is worth.
        twin: A difference to healthy runs beyond it is a symptom. Measured on healthy runs of the embedded original.
        twin_still: A difference within it is none.
        twin_inflation: Factor from what neighbouring blocks of a run differ by to what seeds differ by.
        fall: Share of what had been gained that a reward must lose.
        gap_growth: Factor by which a gap must grow.
        grad_growth: Factor by which a gradient norm must grow.
    """

    jump_alpha: float = 0.01
    jump_inflation: float = 1.1
    prior_dof: float = 8.0
    twin: float = 5.0
    twin_still: float = 2.0
    twin_inflation: float = 2.0
    fall: float = 0.5
    gap_growth: float = 3.0
    grad_growth: float = 10.0


DEFAULT = Margins()


def transformed(metric: Metric, values: Array, digit: float = 0.0) -> Array:
    """Return log10(max(x, 0) + ε) or x, as the metric's card says; ε is at least the last printed digit."""
    if metric.transform == "log10":
        return np.log10(np.maximum(values, 0.0) + max(metric.epsilon, digit))
    return values


def block_medians(steps: Array, values: Array, edges: Array) -> Array:
    """Return the median of each block (NaN where empty); edges are step numbers, right ends included."""
    cut = np.searchsorted(steps, edges, side="right")
    return np.array([median(values[a:b]) for a, b in pairwise(cut)])


def normal_quantile(upper: float) -> float:
    """Return the z with the given upper-tail probability below ½, by Newton's method on the tail's logarithm."""
    z = math.sqrt(-2.0 * math.log(upper)) if upper < 0.5 else 0.0
    for _ in range(20):
        tail = 0.5 * math.erfc(z / math.sqrt(2.0))
        density = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
        z += tail * math.log(tail / upper) / density
    return z


def t_quantile(upper: float, dof: float) -> float:
    """Return the t value with the given upper-tail probability (Cornish–Fisher; 1 % right from 6 degrees on)."""
    z = normal_quantile(upper)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof**power for power, term in enumerate(terms, 1))


def _edges(log: Log, most: int = 16) -> Array:
    """Return the edges of equal blocks of at least four logged points over the whole run."""
    steps = log.steps_N
    count = max(1, min(most, len(steps) // 4))
    return np.linspace(steps[0] - 1, steps[-1], count + 1)


def _dense(log: Log) -> list[Metric]:
    """Return the ranking metrics with enough points."""
    return [m for m in METRICS if m.ranks and len(finite(log, m.name)[0]) >= MIN_POINTS]


def jumps(log: Log, margins: Margins = DEFAULT) -> Iterator[Observation]:
    """Yield the first jump of every metric: two neighbouring blocks away from the three before, on one side.

    By more than c·s + 2.5·|median step so far|: a steady drift is no jump. s² is the variance of the steps so far,
    steadied by the metric's point-to-point noise times what blocks vary more than that by, over all metrics.
    """
    metrics = _dense(log)
    edges = _edges(log)
    blocks = len(edges) - 1
    if not metrics or blocks < 6:
        return
    series = [
        (finite(log, m.name)[0], transformed(m, finite(log, m.name)[1], log.resolution.get(m.name, 0.0)))
        for m in metrics
    ]
    x_MB = np.array([block_medians(steps, values, edges) for steps, values in series])
    tests = 2 * len(metrics) * (blocks - 4)
    improves = rises(log)
    done: set[str] = set()
    for b in range(3, blocks - 1):
        steps_MB = np.diff(x_MB[:, :b])
        drift_M = np.array([median(row[np.isfinite(row)]) for row in steps_MB])
        dof = b - 2
        variance_M = np.nansum((steps_MB - drift_M[:, None]) ** 2, 1) / dof / 2
        noise_M = np.array([wiggle(values[steps <= edges[b]]) for steps, values in series])
        known = (noise_M > 0) & (variance_M > 0)
        redness = float(np.median(variance_M[known] / noise_M[known] ** 2)) if known.any() else 0.0
        prior_M = np.where(noise_M > 0, redness * noise_M**2, variance_M)
        s_M = np.sqrt((dof * variance_M + margins.prior_dof * prior_M) / (dof + margins.prior_dof))
        c = (
            margins.jump_inflation
            * t_quantile(margins.jump_alpha / tests, dof + margins.prior_dof)
            * math.sqrt(1.52)
        )
        before_M = np.array([median(row[np.isfinite(row)]) for row in x_MB[:, b - 3 : b]])
        away_MB = x_MB[:, b : b + 2] - before_M[:, None]
        excess_M = np.abs(away_MB).min(1) - 2.5 * np.abs(drift_M)
        floor_M = np.array([max(m.floor, 2 * log.resolution.get(m.name, 0.0)) for m in metrics])
        usual_M = np.array([usual(m.name) * HEAVY.get(m.name, 1.0) for m in metrics])
        beyond_M = (away_MB[:, 0] * away_MB[:, 1] > 0) & (excess_M > np.maximum(c * s_M, floor_M))
        beyond_M &= np.abs(away_MB).min(1) > usual_M  # within what healthy systems show, nothing jumps
        for m in np.flatnonzero(beyond_M):
            name = metrics[m].name
            if name in done:
                continue
            done.add(name)
            up = away_MB[m, 0] > 0
            before, after = _around(log, name, edges, b)
            yield Observation(
                name,
                "up" if up else "down",
                "sudden",
                interval=(int(edges[b - 1]) + 1, int(edges[b + 1])),
                value=after,
                healthy=before,
                evidence=f"jumps from {before:.3g} to {after:.3g} between steps {int(edges[b - 1]) + 1} and "
                f"{int(edges[b + 1])}",
                alarm=_is_bad(name, up, improves),
                rule="jump",
            )


def usual(metric: str) -> float:
    """Return how far a metric of the gap is from "no gap" in healthy systems, 0 for other metrics."""
    limit = GAP_LIMITS.get(metric)
    return 0.0 if limit is None else limit.usual if limit.neutral == 0 else abs(limit.neutral - limit.usual)


def _is_bad(metric: str, up: bool, improves: bool | None) -> bool:
    """Whether a jump is a symptom: better rewards aren't, nor what follows from them (groups that agree)."""
    quantity = QUANTITY.get(metric, ("", 1))[0]
    if quantity in ("reward", "held_out"):
        return not up
    if quantity in (
        "advantage",
        "signal",
    ):  # both change by leaps when a small batch's groups become all right
        return quantity == "signal" and not improves
    return True


def _around(log: Log, metric: str, edges: Array, b: int) -> tuple[float, float]:
    """Return the medians of the three blocks before block b and of the two from it on, raw units."""
    steps, values = finite(log, metric)
    before = values[(steps > edges[b - 3]) & (steps <= edges[b])]
    after = values[(steps > edges[b]) & (steps <= edges[b + 2])]
    return median(before), median(after)


def wiggle(values: Array) -> float:
    """Return the point-to-point noise of a series: 1.48 · median |difference| / √2."""
    difference = np.diff(values)
    return (
        1.4826 * median(np.abs(difference - median(difference))) / math.sqrt(2)
        if len(difference) > 2
        else 0.0
    )


def block_noise(x_B: Array) -> float:
    """Return the standard deviation of a block median, from second differences: a rise and a bend are no noise."""
    second = np.diff(x_B[np.isfinite(x_B)], 2)
    return float(np.sqrt(np.mean(second**2) / 6)) if len(second) > 1 else 0.0
