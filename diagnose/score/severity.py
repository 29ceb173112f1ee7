"""Severity: which strength of a fault fits the incident, and which others the evidence does not rule out.

Legend of shape suffixes: ``_S`` strengths tried, ``_D`` bootstrap draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from diagnose.score.specificity import Gaps


def severity_interval(strengths_S: Sequence[float], gaps: Gaps) -> tuple[float, float]:
    """Return (low, high), the strengths that are not shown to be farther from the incident than the nearest one.

    A strength is ruled out when the lower end of the bootstrap interval of its distance less that of the nearest
    strength is above 0 (the draws share the original's noise and the metrics' weights, so it is a paired
    comparison). The profile of the distance is taken to have one valley: the interval ends half way, on a log
    scale, between the outermost strength that is not ruled out and the next one tried. Where there is none
    beyond, the end is open: 0 or infinity.

    Args:
        strengths_S: Strengths tried, ascending.
        gaps: Their distances, observed and under resampling, in the same order.
    """
    assert list(strengths_S) == sorted(strengths_S), strengths_S
    best = int(np.argmin(gaps.d_C))
    possible = [s for s in range(len(strengths_S)) if s == best or gaps.gap(best, s)[1] <= 0]
    low, high = min(possible), max(possible)
    return (
        math.sqrt(strengths_S[low] * strengths_S[low - 1]) if low else 0.0,
        math.sqrt(strengths_S[high] * strengths_S[high + 1]) if high + 1 < len(strengths_S) else math.inf,
    )
