"""Effects: what a fault did to each metric in each block, against healthy runs of the same system.

Legend of shape suffixes: ``_R`` faulty runs, ``_K`` healthy runs, ``_M`` metrics, ``_B`` blocks, ``_W`` windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnose.curves import Array
from diagnose.score.align import Panel, nanmean, nanmedian
from diagnose.score.settings import Settings
from diagnose.score.windows import window_effects, window_means


@dataclass(frozen=True)
class Effect:
    """Effect curves of one system, in transformed units.

    Attributes:
        metrics: Names.
        e_MB: Median over faulty runs of the block medians, less the median over healthy runs.
        late_M: Median of e_MB over the late half of the blocks.
        window_MW: Mean of e_MB over every window (`windows`).
        event_MB: Share of faulty runs with non-finite values in the block, less that of healthy runs.
        variance_MB: Variance of e_MB in units of the variance between two seeds, from the number of runs.
        variance_late_M: The same for the late half.
        variance_window_MW: The same for every window.
        doubt_MB: Further standard deviation, from a reference that is itself a stand-in.
        doubt_late_M: The same for the late half.
        doubt_window_MW: The same for every window.
    """

    metrics: tuple[str, ...]
    e_MB: Array
    late_M: Array
    window_MW: Array
    event_MB: Array
    variance_MB: Array
    variance_late_M: Array
    variance_window_MW: Array
    doubt_MB: Array
    doubt_late_M: Array
    doubt_window_MW: Array


def median_variance(n: Array) -> Array:
    """Return the variance of the median of n independent standard normal values, to within 3 %.

    π / (2n + c) with c set so that it is exact at n = 1 (c = π − 2) and n = 2 (c = 2π − 4); both tend to the
    textbook π / 2n. NaN for n = 0.
    """
    n = np.asarray(n, float)
    c = np.where(n % 2 == 1, np.pi - 2, 2 * np.pi - 4)
    return np.asarray(np.divide(np.pi, 2 * n + c, out=np.full(n.shape, np.nan), where=n > 0))


def late(x_MB: Array) -> Array:
    """Return the median over the late half of the blocks (the last axis)."""
    return nanmedian(x_MB[..., x_MB.shape[-1] // 2 :])


def effect(faulty: Panel, healthy: Panel, settings: Settings, *, borrowed: bool = False) -> Effect:
    """Measure faulty runs against healthy ones: e_b = med_b(faulty) − median over healthy runs of med_b.

    Args:
        faulty: Faulty runs.
        healthy: Healthy runs on the same clock and contrast.
        settings: Thresholds.
        borrowed: The healthy runs are the other system's (no twin): they only stand in for the drift that the
            run would have had, and a share of that drift is doubt.
    """
    assert faulty.metrics == healthy.metrics
    reference_MB = nanmedian(healthy.x_RMB, 0)
    e_MB = nanmedian(faulty.x_RMB, 0) - reference_MB
    variance_MB = median_variance(np.isfinite(faulty.x_RMB).sum(0)) + median_variance(
        np.isfinite(healthy.x_RMB).sum(0)
    )
    half = slice(e_MB.shape[1] // 2, None)
    doubt_MB = settings.drift_doubt * np.abs(reference_MB) if borrowed else np.zeros(e_MB.shape)
    return Effect(
        metrics=faulty.metrics,
        e_MB=e_MB,
        late_M=late(e_MB),
        window_MW=window_effects(e_MB, reference_MB),
        event_MB=np.maximum(nanmean(faulty.event_RMB, 0) - nanmean(healthy.event_RMB, 0), 0.0),
        variance_MB=variance_MB,
        variance_late_M=nanmean(variance_MB[:, half]),
        variance_window_MW=window_means(variance_MB),
        doubt_MB=doubt_MB,
        doubt_late_M=late(doubt_MB),
        doubt_window_MW=window_means(doubt_MB),
    )
