"""Curves: what a training log is turned into, whatever its format.

Legend of shape suffixes: ``_N`` logged steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """The metric curves of one run, on one clock.

    Attributes:
        source: Where the curves come from, for humans.
        steps_N: Training steps, strictly increasing integers as float64.
        values: Canonical metric name → values_N. NaN where the metric was not logged at that step *or* was
            logged as non-finite; the second kind is also listed in `nonfinite`.
        nonfinite: Canonical metric name → the steps at which it was logged as NaN, inf or null. Non-finite
            values are an event channel and never enter a median.
        events: Things the log says happened, e.g. ``("resume", 40)``.
        resolution: Canonical metric name → size of the last printed digit, for logs that round every value
            (old verl consoles print three decimals). Such a 0 means "less than half of it", not zero. Empty
            for exact logs.
    """

    source: str
    steps_N: Array
    values: Mapping[str, Array]
    nonfinite: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()
    resolution: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (np.diff(self.steps_N) > 0).all(), "steps must increase"
        assert all(v.shape == self.steps_N.shape for v in self.values.values())

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have at least one value."""
        return tuple(self.values)


def median_between(runs: Sequence[Curves], metric: str, low: float, high: float = np.inf) -> float:
    """Return the median of a metric over the steps from `low` to before `high` of some runs, NaN without a value."""
    parts = [
        run.values[metric][(run.steps_N >= low) & (run.steps_N < high)]
        for run in runs
        if metric in run.values
    ]
    values_N = np.concatenate(parts) if parts else np.empty(0)
    values_N = values_N[np.isfinite(values_N)]
    return float(np.median(values_N)) if len(values_N) else float("nan")
