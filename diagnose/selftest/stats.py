"""Shares and differences with their intervals; incidents of one fault are one cluster.

Legend of shape suffixes: ``_F`` faults, ``_D`` bootstrap draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
DRAWS = 10_000
SEED = 20


@dataclass(frozen=True)
class Estimate:
    """A number with what it rests on.

    Attributes:
        value: The estimate; NaN without data.
        n: Incidents behind it.
        low: Lower end of the 95 % interval; NaN where there is none.
        high: Upper end.
        faults: Clusters behind the interval, 0 where it treats every incident as independent.
    """

    value: float
    n: int
    low: float
    high: float
    faults: int = 0

    def to_json(self) -> dict[str, float | int | None]:
        """Return the estimate as JSON-able data, unknown numbers as None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"value": known["value"], "n": self.n, "interval_95": [known["low"], known["high"]]}  # type: ignore[dict-item]


def share(hits: int, n: int) -> Estimate:
    """Return a share of independent cases with its Wilson score interval (Wilson 1927)."""
    if n == 0:
        return Estimate(math.nan, 0, math.nan, math.nan)
    p, z2 = hits / n, Z95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Estimate(p, n, max(0.0, middle - half), min(1.0, middle + half))


def mean_by_fault(values: Iterable[tuple[str, float]], *, proportion: bool = False) -> Estimate:
    """Return the mean over incidents, with a percentile interval from resampling whole faults.

    Incidents of one fault share their mechanism and mostly their replays, so faults are what is drawn, with
    replacement, `DRAWS` times. A share of 0 or 1 would get an interval of width 0; it gets the Wilson interval over
    faults instead.

    Args:
        values: (fault, value) of every incident.
        proportion: Whether the mean is a share.
    """
    groups: dict[str, list[float]] = {}
    for fault, value in values:
        groups.setdefault(fault, []).append(value)
    n = sum(map(len, groups.values()))
    if not groups:
        return Estimate(math.nan, 0, math.nan, math.nan)
    sum_F = np.array([sum(group) for group in groups.values()])
    count_F = np.array([len(group) for group in groups.values()], float)
    value = float(sum_F.sum() / count_F.sum())
    if len(groups) == 1:
        return Estimate(value, n, math.nan, math.nan, 1)
    if proportion and value in (0.0, 1.0):
        plain = share(round(value * len(groups)), len(groups))
        return Estimate(value, n, plain.low, plain.high, len(groups))
    low, high = _percentiles(sum_F, count_F)
    return Estimate(value, n, low, high, len(groups))


def paired_by_fault(pairs: Iterable[tuple[str, float, float]]) -> Estimate:
    """Return the mean of first − second over incidents, its interval from resampling whole faults.

    Args:
        pairs: (fault, ours, theirs) of every incident that both diagnosed.
    """
    return mean_by_fault([(fault, ours - theirs) for fault, ours, theirs in pairs])


def _percentiles(sum_F: np.ndarray, count_F: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(SEED)
    faults = len(sum_F)
    weight_DF = rng.multinomial(faults, np.full(faults, 1 / faults), size=DRAWS)
    mean_D = weight_DF @ sum_F / (weight_DF @ count_F)
    low, high = np.quantile(mean_D, [0.025, 0.975])
    return float(low), float(high)


def confusion(pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Return truth → what was named → count, both in the order of their first appearance."""
    table: dict[str, dict[str, int]] = {}
    for truth, named in pairs:
        row = table.setdefault(truth, {})
        row[named] = row.get(named, 0) + 1
    return table


def least_detectable(seen: Mapping[float, Sequence[bool]]) -> float | None:
    """Return the smallest strength from which on every incident was detectable, None where there is none.

    Args:
        seen: Strength → whether each of its incidents was detectable.
    """
    least = None
    for strength in sorted(seen, reverse=True):
        if not all(seen[strength]):
            break
        least = strength
    return least
