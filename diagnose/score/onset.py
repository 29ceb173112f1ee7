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
from diagnose.score.shape import jumps, onset_block, onset_interval
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
    floor_M = floors(cut, (home.scale,), digits)
    home = home.with_maxima(floor_M, settings)
    moved = read(
        effect(panel(faulty, clock, cut), home.reference, settings),
        home.scale,
        home.margin(len(metrics), settings),
        floor_M,
        settings,
    )
    found = []
    for m in np.flatnonzero(np.abs(moved.peak_M) > moved.margin.fault):
        z_B, c = moved.z_MB[m], moved.margin.c
        block = onset_block(z_B, c)
        low, high = onset_interval(block, clock) or (clock.start, clock.start + clock.horizon - 1)
        sharp = (
            block is not None
            and block >= settings.delayed_blocks
            and jumps(moved.effect.e_MB[m], block, settings)
        )
        found.append((low, high, sharp, metrics[m]))
    return found


def _against_past(
    faulty: Sequence[Curves], metrics: tuple[str, ...], clock: Clock, settings: Settings
) -> list[tuple[int, int, bool, str]]:
    """Return (low, high, sharp, metric) of the first jump of every metric that jumps.

    J_b = mean(x_b, x_{b+1}) − median(x_{b−3..b−1}) for b ≥ 3 is a jump when both blocks lie on one side and
    |J_b| − 2.5·|median step so far| > c · s, with s the standard deviation of the steps so far and c the t
    margin: a steady drift moves J by 2.5 steps and is no jump.
    """
    digits = resolutions(faulty)
    cut = frame(metrics, Contrast.TWIN, digits, settings)
    x_MB = nanmedian(panel(faulty, clock, cut).x_RMB, 0)
    floor_M = floors(cut, (), digits)
    found = []
    tests = 2 * len(metrics) * max(clock.blocks - 4, 1)
    for m, name in enumerate(metrics):
        for b in range(3, clock.blocks - 1):
            past_B = x_MB[m, :b]
            steps = np.diff(past_B)
            drift = float(np.nan_to_num(np.median(steps)))
            # Half the mean square of the residual steps is the variance of one block.
            s = float(np.sqrt(np.sum((steps - drift) ** 2) / max(len(steps) - 1, 1) / 2))
            level = float(np.median(past_B[-3:]))
            away = x_MB[m, b : b + 2] - level
            if not np.isfinite(away).all() or away[0] * away[1] <= 0:
                continue
            root = float(np.sqrt(0.5 + median_variance(np.asarray(3.0))))
            excess = min(abs(away[0]), abs(away[1])) - 2.5 * abs(drift)
            c = t_quantile(settings.alpha / tests, max(len(steps) - 1, 1))
            if excess > max(c * s * root, floor_M[m]):
                interval = onset_interval(b, clock)
                assert interval is not None
                found.append((*interval, True, name))
                break
    return found
