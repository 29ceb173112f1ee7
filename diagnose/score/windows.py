"""Lasting effects: the mean over all blocks from one on, which shows a weak effect that no single block shows.

A fault that stays active moves every block after its onset a little. The windows are the suffixes that start in the
first half of the blocks, from the whole run to the late half; each is judged in its own noise unit.

Legend of shape suffixes: ``_K`` healthy runs, ``_M`` metrics, ``_B`` blocks, ``_W`` windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Array
from diagnose.score.align import nanmean, nanmedian
from diagnose.score.settings import Settings


def starts(blocks: int) -> NDArray[np.int64]:
    """Return the first block of every window, the whole run first, the late half last."""
    return np.arange(blocks // 2 + 1) if blocks > 1 else np.zeros(1, int)


def window_means(x_MB: Array) -> Array:
    """Return the mean over every window's blocks that have a value (the last axis becomes windows)."""
    return np.stack([nanmean(x_MB[..., b:]) for b in starts(x_MB.shape[-1])], -1)


def window_effects(e_MB: Array, reference_MB: Array) -> Array:
    """Return the mean effect over every window, e_MW.

    NaN where a block of the window has a reference but no effect: a mean over fewer blocks is noisier than the
    noise unit says.
    """
    gone_MB = np.isfinite(reference_MB) & ~np.isfinite(e_MB)
    gone_MW = np.stack([gone_MB[..., b:].any(-1) for b in starts(e_MB.shape[-1])], -1)
    return np.where(gone_MW, np.nan, window_means(e_MB))


def penalties(blocks: int, settings: Settings) -> Array:
    """Return what a window's |z| is reduced by before it competes: window_penalty · √(2 ln(B / length)).

    There are more independent short windows than long ones, so that the largest of them is larger by chance. The
    form is that of multiscale tests (Dümbgen and Spokoiny 2001), 0 for the whole run.
    """
    length_W = blocks - starts(blocks)
    return np.asarray(settings.window_penalty * np.sqrt(2 * np.log(blocks / length_W)))


def window_variance(residual_KMB: Array, settings: Settings) -> Array:
    """Return the variance of window means between seeds, v_MW: (d · s² + d₀ · s₀²) / (d + d₀).

    s² is the seeds' own variance with d = K − 1 degrees of freedom. s₀² is what blocks with an AR(1) correlation
    would give: each metric's variance and correlation of neighbouring blocks come from K · B values and so are far
    less uncertain than s². What AR(1) misses (seeds that differ in level, say) is put right by the median of
    s²/s₀² over all metrics at once, by window. d₀ = `window_dof`.

    Args:
        residual_KMB: Healthy block medians less their mean over seeds; axes before these three are kept.
        settings: Thresholds.
    """
    seeds, _, blocks = residual_KMB.shape[-3:]
    first_W = starts(blocks)
    mean_KMW = window_means(residual_KMB)
    mean_KMW = mean_KMW - nanmean(mean_KMW, -3)[..., None, :, :]
    k_MW = np.isfinite(mean_KMW).sum(-3)
    own_MW = np.where(k_MW > 1, nanmean(mean_KMW**2, -3) * k_MW / np.maximum(k_MW - 1, 1), np.nan)
    spread = seeds / max(seeds - 1, 1)
    variance_M = nanmean(nanmean(residual_KMB**2, -3)) * spread
    neighbours_KMB = residual_KMB[..., 1:] * residual_KMB[..., :-1]
    covariance_M = np.nan_to_num(nanmean(nanmean(neighbours_KMB, -3))) * spread
    rho_M = np.divide(covariance_M, variance_M, out=np.zeros_like(variance_M), where=variance_M > 0)
    rho_M = np.clip(rho_M, 0.0, 0.95)
    # The mean over B blocks has the variance of one times (B + 2 Σ_k (B − k) ρ^k) / B².
    lag_BB = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks)))
    pairs_WB = np.array([np.bincount(lag_BB[b:, b:].ravel(), minlength=blocks) for b in first_W])
    pairs_WB = pairs_WB / (blocks - first_W)[:, None] ** 2
    model_MW = variance_M[..., None] * (rho_M[..., None] ** np.arange(blocks) @ pairs_WB.T)
    own_MW = np.where(np.isfinite(own_MW), own_MW, model_MW)
    ratio_MW = np.divide(own_MW, model_MW, out=np.full(own_MW.shape, np.nan), where=model_MW > 0)
    # The median of χ²_d / d is below 1 (Wilson and Hilferty).
    centre = (1 - 2 / (9 * max(seeds - 1, 1))) ** 3
    size_1W = np.nan_to_num(nanmedian(np.where(ratio_MW > 0, ratio_MW, np.nan), -2), nan=1.0)[..., None, :]
    d, d0 = seeds - 1, settings.window_dof
    return np.asarray((d * own_MW + d0 * size_1W / centre * model_MW) / (d + d0))
