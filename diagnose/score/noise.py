"""Noise: how much healthy runs differ, and the margin that an effect must leave to count as a movement.

Legend of shape suffixes: ``_K`` healthy runs, ``_M`` metrics, ``_B`` blocks, ``_W`` windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from diagnose.curves import Array, Curves
from diagnose.score.align import Frame, Panel, nanmean, nanmedian, stacks
from diagnose.score.effect import late, median_variance
from diagnose.score.settings import Settings
from diagnose.score.windows import penalties, starts, window_means, window_variance


class Source(StrEnum):
    """Where a noise scale comes from, best first."""

    CALIBRATED = "calibrated"
    """Healthy seeds of this very system, enough to read margins off them."""
    OWN_SEEDS = "own seeds"
    """Some healthy seeds of this system: a standard deviation, and a t quantile."""
    STAND_IN = "stand-in"
    """The other system's seeds, inflated and adapted to this system's step-to-step noise."""
    WITHIN_RUN = "within run"
    """Differences of neighbouring blocks inside single runs, inflated."""


@dataclass(frozen=True)
class Scale:
    """Standard deviations between two healthy seeds of one system, in transformed units.

    Attributes:
        source: Where they come from.
        seeds: Healthy seeds behind them.
        dof: Degrees of freedom.
        sigma_MB: Standard deviation of block medians.
        late_M: Standard deviation of the median over the late half.
        window_MW: Standard deviation of the mean over every window (`windows`).
        bank_KMB: Residual curves of the seeds in units of sigma_MB, for the bootstrap; may be empty.
        maxima_K: Leave-one-seed-out maxima, see `leave_one_out`; empty where there are too few seeds.
    """

    source: Source
    seeds: int
    dof: float
    sigma_MB: Array
    late_M: Array
    window_MW: Array
    bank_KMB: Array
    maxima_K: Array


@dataclass(frozen=True)
class Floors:
    """Effects, in transformed units, up to which nothing counts as a movement whatever the noise.

    Attributes:
        metric_M: For blocks and the late half.
        window_MW: For the mean over every window; one column where all are alike.
    """

    metric_M: Array
    window_MW: Array


@dataclass(frozen=True)
class Margin:
    """How many noise units an effect must exceed.

    Attributes:
        c: To give a metric a direction.
        fault: To call a log faulty; not below c.
        smallest_p: Smallest honest p: 1 / (K + 1), 1 where no seeds allow a p at all.
        weak: Whether the margin rests on less than calibrated seeds of the system itself.
    """

    c: float
    fault: float
    smallest_p: float
    weak: bool


def _moments(x_KMB: Array, settings: Settings) -> tuple[Array, Array, Array]:
    """Return (sigma_MB, late_M, window_MW); the variance of a block is pooled with its metric's mean.

    Axes before seeds, metrics and blocks are kept: several sets of seeds at once.
    """
    residual_KMB = x_KMB - nanmean(x_KMB, -3)[..., None, :, :]
    k_MB = np.isfinite(x_KMB).sum(-3)
    square_MB = nanmean(residual_KMB**2, -3)
    variance_MB = np.where(k_MB > 1, square_MB * k_MB / np.maximum(k_MB - 1, 1), np.nan)
    mean_M = nanmean(variance_MB)
    share = settings.block_pooling
    mean_M1 = mean_M[..., None]
    pooled_MB = np.where(np.isfinite(variance_MB), share * mean_M1 + (1 - share) * variance_MB, mean_M1)
    late_KM = late(residual_KMB)
    late_KM = late_KM - nanmean(late_KM, -2)[..., None, :]
    k_M = np.isfinite(late_KM).sum(-2)
    late_M = np.where(k_M > 1, nanmean(late_KM**2, -2) * k_M / np.maximum(k_M - 1, 1), mean_M)
    return np.sqrt(pooled_MB), np.sqrt(late_M), np.sqrt(window_variance(residual_KMB, settings))


def seed_scale(healthy: Panel, settings: Settings) -> Scale:
    """Return the scale of a system from its own healthy seeds (at least two)."""
    x_KMB = healthy.x_RMB
    sigma_MB, late_M, window_MW = _moments(x_KMB, settings)
    seeds = x_KMB.shape[0]
    calibrated = seeds >= settings.calibrated_seeds
    unit_MB = np.where(sigma_MB > 0, sigma_MB, np.inf)
    spread = np.sqrt(seeds / max(seeds - 1, 1))
    bank_KMB = np.nan_to_num((x_KMB - nanmean(x_KMB, 0)) * spread / unit_MB)
    return Scale(
        source=Source.CALIBRATED if calibrated else Source.OWN_SEEDS,
        seeds=seeds,
        dof=seeds - 1,
        sigma_MB=sigma_MB,
        late_M=late_M,
        window_MW=window_MW,
        bank_KMB=bank_KMB,
        maxima_K=np.empty(0),
    )


def within_run_scale(healthy: Panel, settings: Settings) -> Scale:
    """Return a scale from the differences of neighbouring blocks inside each run, trend removed, inflated.

    Var(x_b − x_{b+1}) = 2σ² for independent blocks; what seeds differ by beyond that cannot be seen from inside a
    run, hence `residual_inflation`.
    """
    step_RMB = np.diff(healthy.x_RMB, axis=-1)
    step_RMB = step_RMB - nanmean(step_RMB)[..., None]
    count_M = np.isfinite(step_RMB).sum((0, 2))
    dof_M = count_M - np.isfinite(step_RMB).any(2).sum(0)
    square_M = np.where(np.isfinite(step_RMB), step_RMB**2, 0.0).sum((0, 2))
    variance_M = np.divide(square_M, 2 * dof_M, out=np.full(len(count_M), np.nan), where=dof_M > 0)
    sigma_M = settings.residual_inflation * np.sqrt(variance_M)
    shape = healthy.x_RMB.shape[1:]
    return Scale(
        source=Source.WITHIN_RUN,
        seeds=healthy.x_RMB.shape[0],
        dof=float(max(np.median(dof_M) if len(dof_M) else 0, 1)),
        sigma_MB=np.broadcast_to(sigma_M[:, None], shape).copy(),
        late_M=sigma_M,
        window_MW=np.repeat(sigma_M[:, None], len(starts(shape[1])), 1),
        bank_KMB=np.empty((0, *shape)),
        maxima_K=np.empty(0),
    )


def wiggle(runs: Sequence[Curves], frame: Frame, before: float = np.inf) -> Array:
    """Return the step-to-step noise of each metric: √π/2 · mean |x_t − x_{t−1}|, median over runs.

    The mean, not the median: metrics at a ceiling (the largest advantage of a group) stay put most of the time.

    Args:
        runs: Runs of one system.
        frame: The comparison's frame.
        before: Only steps below this one are used (what comes after is the fault's).
    """
    found_RM = np.full((len(runs), len(frame.metrics)), np.nan)
    for indices, steps_N, values_RMN in stacks(runs, frame):
        values_RMN = values_RMN[:, :, steps_N < before]
        for m in range(len(frame.metrics)):
            logged_RN = values_RMN[:, m, np.isfinite(values_RMN[:, m]).any(0)]
            if logged_RN.shape[1] > 3:
                found_RM[indices, m] = nanmean(np.abs(np.diff(logged_RN))) * math.sqrt(math.pi) / 2
    return nanmedian(found_RM, 0)


def stand_in_scale(
    lent: Scale, own: Panel, own_wiggle_M: Array, lent_wiggle_M: Array, settings: Settings
) -> Scale:
    """Return the other system's scale, adapted to this one's step-to-step noise, and inflated.

    σ = stand_in_inflation · σ_lent · max(wiggle / wiggle_lent, wiggle_floor). Where the lender's metric is constant,
    no ratio exists, and σ comes from the differences of the system's own neighbouring blocks.
    """
    ratio_known = (lent_wiggle_M > 0) & np.isfinite(own_wiggle_M)
    ratio_M = np.where(ratio_known, own_wiggle_M, 1.0) / np.where(ratio_known, lent_wiggle_M, 1.0)
    ratio_M = np.maximum(ratio_M, settings.wiggle_floor)
    blocks_M = np.nan_to_num(within_run_scale(own, replace(settings, residual_inflation=1.0)).late_M)
    blocks_M = np.where(ratio_known, 0.0, blocks_M)
    factor = settings.stand_in_inflation
    return replace(
        lent,
        source=Source.STAND_IN,
        sigma_MB=factor * np.fmax(lent.sigma_MB * ratio_M[:, None], blocks_M[:, None]),
        late_M=factor * np.fmax(lent.late_M * ratio_M, blocks_M),
        window_MW=factor * np.fmax(lent.window_MW * ratio_M[:, None], blocks_M[:, None]),
    )


def blended(own: Scale, lent: Scale, settings: Settings) -> Scale:
    """Steady a scale from few own seeds by another one: s² = (d·s_own² + d₀·s_lent²) / (d + d₀).

    The moderated variance of Smyth (2004), with d₀ = `prior_dof` stated rather than fitted.
    """
    d, d0 = own.dof, settings.prior_dof

    def mix(a: Array, b: Array) -> Array:
        return np.where(np.isfinite(b), np.sqrt((d * a**2 + d0 * np.nan_to_num(b) ** 2) / (d + d0)), a)

    return replace(
        own,
        dof=d + d0,
        sigma_MB=mix(own.sigma_MB, lent.sigma_MB),
        late_M=mix(own.late_M, lent.late_M),
        window_MW=mix(own.window_MW, lent.window_MW),
    )


def seed_factor(scale: Scale, own: Panel) -> tuple[float, float]:
    """Return by how much own seeds differ more than a scale says, over all metrics at once: (late half, blocks).

    Each is the root of the median over metrics of s² / σ², over what that median would be for a true scale (the
    median of χ²_d / d, by Wilson and Hilferty). (1, 1) for less than two seeds.
    """
    seeds = own.x_RMB.shape[0]
    if seeds < 2:
        return 1.0, 1.0
    residual_KMB = own.x_RMB - nanmean(own.x_RMB, 0)
    late_KM = late(residual_KMB)
    late_KM = late_KM - nanmean(late_KM, 0)
    dof = seeds - 1
    found = []
    # Blocks of one seed are correlated; they are taken to bring half the freedom that they would have alone.
    for square_M, sigma_M, d in (
        (np.nansum(late_KM**2, 0) / dof, scale.late_M, dof),
        (
            nanmean(np.nansum(residual_KMB**2, 0) / dof),
            nanmean(scale.sigma_MB),
            dof * max(own.x_RMB.shape[2] / 2, 1),
        ),
    ):
        usable = np.isfinite(square_M) & (square_M > 0) & (sigma_M > 0)
        ratio = float(np.median(square_M[usable] / sigma_M[usable] ** 2)) if usable.any() else 1.0
        found.append(math.sqrt(ratio) / (1 - 2 / (9 * d)) ** 1.5)
    return found[0], found[1]


def widened(scale: Scale, own: Panel) -> Scale:
    """Widen a borrowed scale where the system's own few seeds differ more; never narrow it."""
    late_factor, block_factor = (max(factor, 1.0) for factor in seed_factor(scale, own))
    return _resized(scale, late_factor, block_factor)


def _resized(scale: Scale, late_factor: float, block_factor: float) -> Scale:
    """Return a scale with other sizes; the windows, none shorter than the late half, go with the late half."""
    return replace(
        scale,
        sigma_MB=scale.sigma_MB * block_factor,
        late_M=scale.late_M * late_factor,
        window_MW=scale.window_MW * late_factor,
    )


def matched(scale: Scale, own: Panel, settings: Settings) -> Scale:
    """Give a scale from within runs the size that the system's own few seeds show, with `few_inflation` on top.

    From within a run one sees how the noise is spread over the metrics, but not what seeds differ by; two or three
    seeds tell the latter for all metrics together, though for no single one.
    """
    if own.x_RMB.shape[0] < 2:
        return scale
    late_factor, block_factor = (factor * settings.few_inflation for factor in seed_factor(scale, own))
    return _resized(scale, late_factor, block_factor)


def noise_units(e: Array, se: Array, floor: Array, settings: Settings) -> Array:
    """Return z = e / max(se, floor / min_margin), NaN where e is unknown.

    No margin is below `min_margin`, so an effect within its absolute floor never leaves its margin, and a metric
    without any noise has a finite z.
    """
    unit = np.fmax(se, floor / settings.min_margin)
    return np.asarray(np.divide(e, unit, out=np.full(np.shape(e), np.nan), where=unit > 0))


def peak(z_MB: Array, window_z_MW: Array, settings: Settings) -> Array:
    """Return by metric the largest z that counts: of a window, less its penalty, or of two neighbouring blocks.

    A pair of blocks counts with its smaller |z| and only when both lie on one side; that is penalty enough.

    Returns:
        peak_M, signed; 0 where nothing is known. Leading axes are kept.
    """
    z_MB, window_z_MW = np.nan_to_num(z_MB), np.nan_to_num(window_z_MW)
    left_MB, right_MB = z_MB[..., :-1], z_MB[..., 1:]
    pair_MB = np.where(left_MB * right_MB > 0, np.minimum(np.abs(left_MB), np.abs(right_MB)), 0.0)
    reduced_MW = np.maximum(np.abs(window_z_MW) - penalties(z_MB.shape[-1], settings), 0.0)
    # Candidates for the peak: all windows, then all pairs.
    all_ME = np.concatenate([reduced_MW * np.sign(window_z_MW), pair_MB * np.sign(right_MB)], -1)
    best_M1 = np.abs(all_ME).argmax(-1)[..., None]
    return np.take_along_axis(all_ME, best_M1, -1)[..., 0]


def leave_one_out(healthy: Panel, floors: Floors, settings: Settings) -> Array:
    """Return, for each healthy seed measured against the others, its maximum |z| over all metrics.

    Every seed plays a faulty run once; scale and reference come from the others. These K numbers are what the
    one number of an incident is compared with, so that the error is that of all metrics together.
    """
    x_KMB = healthy.x_RMB
    seeds = x_KMB.shape[0]
    others = np.array([[other for other in range(seeds) if other != k] for k in range(seeds)])
    # Leading axis: the seed left out.
    others_KLMB = x_KMB[others]
    sigma_KMB, _, sigma_KMW = _moments(others_KLMB, settings)
    root = math.sqrt(1.0 + float(median_variance(np.asarray(seeds - 1))))
    e_KMB = x_KMB - nanmedian(others_KLMB, 1)
    z_KMB = noise_units(e_KMB, sigma_KMB * root, floors.metric_M[:, None], settings)
    z_KMW = noise_units(window_means(e_KMB), sigma_KMW * root, floors.window_MW, settings)
    return np.asarray(np.abs(peak(z_KMB, z_KMW, settings)).max(-1, initial=0.0))


def t_quantile(upper: float, dof: float) -> float:
    """Return the t value with the given upper-tail probability."""
    from scipy.special import stdtrit  # narrow and late: `diagnose --help` must not pay for it

    return -float(stdtrit(dof, upper))


def maximum_quantile(maxima_K: Array, alpha: float) -> float:
    """Return what the next maximum exceeds with probability `alpha`.

    The conformal order statistic ⌈(K + 1)(1 − α)⌉ where K allows it; else the larger of the largest maximum and
    of the quantile of a Gumbel law with the maxima's mean and standard deviation.
    """
    ordered_K = np.sort(maxima_K)
    rank = math.ceil((len(ordered_K) + 1) * (1 - alpha))
    if rank <= len(ordered_K):
        return float(ordered_K[rank - 1])
    unit = float(ordered_K.std(ddof=1)) * math.sqrt(6) / math.pi
    reduced = -math.log(-math.log(1 - alpha)) - float(np.euler_gamma)
    return max(float(ordered_K[-1]), float(ordered_K.mean()) + unit * reduced)


def margin(scale: Scale, metrics: int, settings: Settings) -> Margin:
    """Return the margins of a scale.

    With calibrated seeds they are quantiles of the leave-one-seed-out maxima; with fewer, t quantiles, Bonferroni
    over `tests_a_metric` tests a metric.

    Args:
        scale: The noise scale.
        metrics: Metrics in the log.
        settings: Thresholds.
    """
    maxima_K = scale.maxima_K[np.isfinite(scale.maxima_K)]
    seeds = len(maxima_K)

    def exceeded(alpha: float) -> float:
        if seeds >= settings.calibrated_seeds:
            return maximum_quantile(maxima_K, alpha)
        return t_quantile(min(alpha / (settings.tests_a_metric * max(metrics, 1)), 0.25), scale.dof)

    c = max(exceeded(settings.alpha_direction), settings.min_margin)
    fault = max(exceeded(settings.alpha), c)
    return Margin(
        c=c,
        fault=fault,
        smallest_p=1 / (seeds + 1),
        weak=scale.source is not Source.CALIBRATED,
    )
