"""When did the incident start: where a replay's injection goes, and where the original's clock begins.

Legend of shape suffixes: ``_M`` metrics, ``_B`` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnose.curves import Curves
from diagnose.score.align import (
    Clock,
    Contrast,
    block_count,
    events,
    first_update,
    frame,
    last_step,
    matrix,
    nanmean,
    nanmedian,
    panel,
    points,
    ranking_metrics,
    resolutions,
)
from diagnose.score.calibration import Calibration
from diagnose.score.direction import read
from diagnose.score.effect import effect, median_variance
from diagnose.score.noise import t_quantile, wiggle
from diagnose.score.settings import DEFAULT, Settings
from diagnose.score.shape import change_point, jumps, onset_block, onset_interval
from diagnose.score.system import Healthy, borrowing_system, floors, pooled, system


@dataclass(frozen=True)
class Onset:
    """Onset of an incident in its own log.

    Attributes:
        low: First step at which the fault may have become active.
        high: Last such step.
        sharp: Whether it came as a jump after quiet: only then may the original's clock start here, because a
            fault that was active all along and grows slowly crosses its margin late as well.
        metrics: Metrics that moved anywhere in the log, the earliest first, with the interval of their onset.
        likeliest: The likeliest step in [low, high], where the onset is sharp.
    """

    low: int
    high: int
    sharp: bool
    metrics: Mapping[str, tuple[int, int]]
    likeliest: int | None = None

    @property
    def step(self) -> int:
        """The step at which the original's clock starts, and where a replay's injection goes."""
        return self.low if self.likeliest is None else self.likeliest


def incident_onset(
    original_faulty: Sequence[Curves],
    original_healthy: Sequence[Curves] = (),
    proxy_healthy: Sequence[Curves] = (),
    calibration: Calibration | None = None,
    settings: Settings = DEFAULT,
) -> Onset | None:
    """Find the onset of an incident before anything was replayed: where the injection should go.

    Args:
        original_faulty: Logs of the incident.
        original_healthy: Healthy logs of the original, perhaps none.
        proxy_healthy: Healthy runs of the proxy, if there are any yet.
        calibration: Healthy seeds on file.
        settings: Thresholds.

    Returns:
        The onset, or None where nothing moves or too little is known.
    """
    own = Healthy.of(original_healthy, calibration.original if calibration else None, settings)
    other = Healthy.of(proxy_healthy, calibration.proxy if calibration else None, settings)
    return find_onset(original_faulty, own, other, settings)


def find_onset(faulty: Sequence[Curves], own: Healthy, other: Healthy, settings: Settings) -> Onset | None:
    """Find the onset of an incident over its whole log; None where nothing moves, or too little is known.

    With a twin: the first block that leaves its margin together with the next, over all metrics. Without one: the
    first jump of two neighbouring blocks away from the median of the three before, beyond what the log itself
    drifted until then. A non-finite value is a sharp onset of its own.

    Args:
        faulty: Logs of the incident.
        own: Healthy runs of the original.
        other: Healthy runs of the proxy, whose noise may have to stand in.
        settings: Thresholds.
    """
    if not faulty or not all(len(run.steps_N) for run in faulty):
        return None
    metrics = ranking_metrics(faulty)
    first, last = first_update(faulty), last_step(faulty)
    if own.runs:
        last = min(last, last_step(own.runs))
    found = [
        (step, step, True, name)
        for run in faulty
        for name, steps in events(run, settings).items()
        for step in steps
    ]
    n = min(points(runs, first, last) for runs in (faulty, own.runs) if runs)
    if n // settings.points_a_block >= settings.min_blocks and metrics:
        clock = Clock(first, last - first + 1, block_count(n, settings, settings.onset_blocks))
        if own.runs:
            found += _against_twin(faulty, own, other, metrics, clock, settings)
        else:
            found += _against_past(faulty, metrics, clock, settings)
    if not found:
        return None
    low, high = min(((start, end) for start, end, *_ in found), key=lambda item: (item[1], item[0]))
    sharp = any(item[2] for item in found if item[:2] == (low, high))
    each: dict[str, tuple[int, int]] = {}
    for start, end, _, name in sorted(found, key=lambda item: item[1]):
        each.setdefault(name, (start, end))
    likeliest = None
    if sharp:
        together = tuple(name for name, interval in each.items() if interval == (low, high))
        likeliest = _likeliest_step(faulty, together, low, high, settings)
    return Onset(low, high, sharp, each, likeliest)


def _likeliest_step(
    faulty: Sequence[Curves], metrics: tuple[str, ...], low: int, high: int, settings: Settings
) -> int:
    """Return the step in [low, high] at which splitting the log explains the metrics best.

    The least-squares change point within twice the interval's width, squares in units of each metric's
    step-to-step noise, summed over metrics and runs.
    """
    if low == high:
        return low
    cut = frame(metrics, Contrast.TWIN, {}, settings)
    width = high - low + 1
    steps = np.arange(low, high + 1)
    cost = np.zeros(len(steps))
    for run in faulty:
        noise_M = wiggle([run], cut, low)
        near = (run.steps_N >= low - width) & (run.steps_N <= high + width)
        values_MN = matrix(run, cut)[:, near] / np.where(noise_M > 0, noise_M, 1.0)[:, None]
        for s, step in enumerate(steps):
            for part in (run.steps_N[near] < step, run.steps_N[near] >= step):
                side_MN = values_MN[:, part]
                cost[s] += np.nansum((side_MN - nanmean(side_MN)[:, None]) ** 2)
    return int(steps[cost.argmin()])


def _against_twin(
    faulty: Sequence[Curves],
    own: Healthy,
    other: Healthy,
    metrics: tuple[str, ...],
    clock: Clock,
    settings: Settings,
) -> list[tuple[int, int, bool, str]]:
    """Return (low, high, sharp, metric) for every metric that moves."""
    digits = resolutions(faulty, own.runs, other.runs)
    cut = frame(metrics, Contrast.TWIN, digits, settings)
    if other.seeds:
        first = first_update(other.seeds)
        there = Clock(first, last_step(other.seeds) - first + 1, clock.blocks)
        lender = system(other, there, cut).with_maxima(floors(cut, (), digits), settings)
        lender = replace(lender, scale=pooled(lender.scale, clock.blocks))
        home = borrowing_system(own, clock, cut, lender, other.seeds, faulty, past_only=False)
    else:
        home = system(own, clock, cut)
    floor = floors(cut, (home.scale,), digits)
    home = home.with_maxima(floor, settings)
    moved = read(
        effect(panel(faulty, clock, cut), home.reference, settings),
        home.scale,
        home.margin(len(metrics), settings),
        floor,
        settings,
    )
    sudden: list[tuple[int, int, bool, str]] = []
    weak: list[tuple[int, int, bool, str]] = []
    for m in np.flatnonzero(np.abs(moved.peak_M) > moved.margin.fault):
        z_B = moved.z_MB[m]
        block = onset_block(z_B, moved.margin.c)
        where = sudden if block is not None else weak
        block = change_point(z_B) if block is None else block
        low, high = onset_interval(block, clock) or (clock.start, clock.start + clock.horizon - 1)
        sharp = (
            block is not None
            and block >= settings.delayed_blocks
            and jumps(moved.effect.e_MB[m], block, settings)
        )
        where.append((low, high, sharp, metrics[m]))
    # The earliest of many change points is early by chance; they only speak where no metric leaves its margin at once.
    return sudden or weak


def _against_past(
    faulty: Sequence[Curves], metrics: tuple[str, ...], clock: Clock, settings: Settings
) -> list[tuple[int, int, bool, str]]:
    """Return (low, high, sharp, metric) of the first jump of every metric that jumps.

    Blocks b and b + 1 are a jump when both lie on one side of the median of the three blocks before, by more than
    c · s + 2.5 · |median step so far| (a steady drift is no jump). s² is the variance of the steps so far, steadied
    like any scale from few values (`prior_dof`): by the metric's step-to-step noise times what blocks vary more
    than that by, over all metrics; c is the t margin, inflated by `jump_inflation` because slow noise moves three
    blocks farther than two neighbours differ.
    """
    digits = resolutions(faulty)
    cut = frame(metrics, Contrast.TWIN, digits, settings)
    x_MB = nanmedian(panel(faulty, clock, cut).x_RMB, 0)
    floor_M = floors(cut, (), digits).metric_M
    root = float(np.sqrt(1.0 + median_variance(np.asarray(3.0))))
    tests = 2 * len(metrics) * max(clock.blocks - 4, 1)
    found: dict[str, tuple[int, int]] = {}
    for b in range(3, clock.blocks - 1):
        steps_MB = np.diff(x_MB[:, :b])
        drift_M = nanmedian(steps_MB)
        dof = b - 2
        variance_M = np.nansum((steps_MB - drift_M[:, None]) ** 2, 1) / dof / 2
        wiggle_M = wiggle(faulty, cut, float(clock.edges_B1[b]))
        known = (wiggle_M > 0) & (variance_M > 0)
        redness = np.median(variance_M[known] / wiggle_M[known] ** 2) if known.any() else 0.0
        prior_M = np.where(wiggle_M > 0, redness * np.nan_to_num(wiggle_M) ** 2, variance_M)
        s_M = np.sqrt((dof * variance_M + settings.prior_dof * prior_M) / (dof + settings.prior_dof))
        c = settings.jump_inflation * t_quantile(settings.alpha / tests, dof + settings.prior_dof)
        away_MB = x_MB[:, b : b + 2] - nanmedian(x_MB[:, b - 3 : b])[:, None]
        together = away_MB[:, 0] * away_MB[:, 1] > 0
        excess_M = np.abs(away_MB).min(1) - 2.5 * np.abs(drift_M)
        interval = onset_interval(b, clock)
        assert interval is not None
        for m in np.flatnonzero(together & (excess_M > np.maximum(c * s_M * root, floor_M))):
            found.setdefault(metrics[m], interval)
    return [(*interval, True, name) for name, interval in found.items()]
