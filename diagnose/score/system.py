"""One system at a time: which healthy runs speak for it, and the noise scale that follows from how many there are.

Legend of shape suffixes: ``_K`` healthy runs, ``_M`` metrics, ``_B`` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnose.curves import Curves
from diagnose.score.align import Clock, Frame, Panel, panel
from diagnose.score.calibration import SeedSet
from diagnose.score.noise import (
    Floors,
    Margin,
    Scale,
    blended,
    leave_one_out,
    margin,
    matched,
    seed_scale,
    stand_in_scale,
    widened,
    wiggle,
    within_run_scale,
)
from diagnose.score.settings import Settings
from diagnose.score.windows import starts
from taxonomy.metrics import METRIC_BY_NAME


@dataclass(frozen=True)
class Healthy:
    """The healthy runs of one system.

    Attributes:
        runs: All of them: what faulty runs are measured against.
        seeds: Those from which noise is estimated: the calibration's where it has enough, else all.
    """

    runs: tuple[Curves, ...]
    seeds: tuple[Curves, ...]

    @classmethod
    def of(cls, runs: Sequence[Curves], calibration: SeedSet | None, settings: Settings) -> Healthy:
        """Join runs with a calibration.

        The two may share runs, which would let a seed vouch for itself; so enough calibration seeds stand alone
        where noise is estimated.
        """
        stored = calibration.curves() if calibration is not None else ()
        both = (*stored, *(run for run in runs if len(run.steps_N)))
        return cls(both, stored if len(stored) >= settings.calibrated_seeds else both)


@dataclass(frozen=True)
class System:
    """One system on its clock.

    Attributes:
        clock: Its clock.
        runs: Healthy runs that faulty ones are measured against; the other system's where this one has none.
        runs_clock: The clock of `runs`.
        reference: Their panel.
        seeds: Panel of the runs from which noise is estimated.
        scale: The noise.
        borrowed: Whether `runs` are the other system's.
    """

    clock: Clock
    runs: tuple[Curves, ...]
    runs_clock: Clock
    reference: Panel
    seeds: Panel
    scale: Scale
    borrowed: bool

    def with_maxima(self, floor: Floors, settings: Settings) -> System:
        """Add the leave-one-seed-out maxima where there are enough seeds of its own for them."""
        if self.seeds.x_RMB.shape[0] < settings.calibrated_seeds:
            return self
        maxima_K = leave_one_out(self.seeds, floor, settings)
        return replace(self, scale=replace(self.scale, maxima_K=maxima_K))

    def margin(self, metrics: int, settings: Settings) -> Margin:
        """Return the margin for a log with so many metrics."""
        return margin(self.scale, metrics, settings)


def system(healthy: Healthy, clock: Clock, frame: Frame) -> System:
    """Return a system that has nobody to borrow from: calibrated, own seeds (steadied), or within run."""
    seeds, settings = panel(healthy.seeds, clock, frame), frame.settings
    if len(healthy.seeds) >= settings.calibrated_seeds:
        scale = seed_scale(seeds, settings)
    else:
        scale = matched(within_run_scale(seeds, settings), seeds, settings)
        if len(healthy.seeds) >= settings.own_seeds:
            scale = blended(seed_scale(seeds, settings), scale, settings)
    reference = seeds if healthy.runs is healthy.seeds else panel(healthy.runs, clock, frame)
    return System(clock, healthy.runs, clock, reference, seeds, scale, borrowed=False)


def borrowing_system(
    healthy: Healthy,
    clock: Clock,
    frame: Frame,
    lender: System,
    lender_seeds: Sequence[Curves],
    faulty: Sequence[Curves],
    *,
    past_only: bool,
) -> System:
    """Return a system that borrows what it lacks.

    With enough seeds of its own it borrows nothing. With some, a lender that has enough steadies its scale. With a
    few, it borrows the scale, or takes its own from within its runs where nobody has enough. With none, it borrows
    scale and reference.

    Args:
        healthy: Its healthy runs, perhaps none.
        clock: Its clock.
        frame: The comparison's frame.
        lender: The other system, on the same blocks.
        lender_seeds: The runs from which the lender's noise was estimated.
        faulty: Its faulty runs, whose past tells the step-to-step noise where there is no healthy run.
        past_only: Whether there is such a past.
    """
    settings = frame.settings
    rich = len(lender_seeds) >= settings.own_seeds
    few = len(healthy.seeds) < settings.calibrated_seeds
    if healthy.runs and not (rich and few):
        return system(healthy, clock, frame)
    seeds = panel(healthy.seeds, clock, frame)
    if healthy.runs:
        own_M = wiggle(healthy.seeds, frame)
    else:
        own_M = wiggle(faulty, frame, clock.start if past_only else np.inf)
    scale = stand_in_scale(lender.scale, seeds, own_M, wiggle(lender_seeds, frame), settings)
    if len(healthy.seeds) >= settings.own_seeds:
        scale = blended(seed_scale(seeds, settings), scale, settings)
    else:
        scale = widened(scale, seeds)
    if healthy.runs:
        return System(clock, healthy.runs, clock, seeds, seeds, scale, borrowed=False)
    return System(clock, lender.runs, lender.clock, lender.reference, seeds, scale, borrowed=True)


def floors(frame: Frame, scales: Sequence[Scale], digits: Mapping[str, float]) -> Floors:
    """Return absolute floors in transformed units.

    The registry's floor, or the last digit of a log that rounds. Metrics in absolute units have one floor for
    both systems: the larger of the registry's and of `floor_multiple` standard deviations of either system, or a
    z against the round-off of the quieter system would saturate.
    """
    floor_M = np.array([METRIC_BY_NAME[name].floor for name in frame.metrics])
    for m, name in enumerate(frame.metrics):
        if METRIC_BY_NAME[name].transform == "identity":
            floor_M[m] = max(floor_M[m], digits.get(name, 0.0))
    window_MW = floor_M[:, None]
    absolute_M = frame.absolute_M
    for scale in scales:
        noisy_M = np.fmax(floor_M, frame.settings.floor_multiple * scale.late_M)
        noisy_MW = np.fmax(window_MW, frame.settings.floor_multiple * scale.window_MW)
        floor_M = np.where(absolute_M, noisy_M, floor_M)
        window_MW = np.where(absolute_M[:, None], noisy_MW, window_MW)
    return Floors(floor_M, window_MW)


def pooled(scale: Scale, blocks: int) -> Scale:
    """Return a scale whose blocks all have their metric's mean variance, for a clock with other blocks."""
    mean_M = np.sqrt(np.nan_to_num(scale.sigma_MB**2).mean(1))
    return replace(
        scale,
        sigma_MB=np.repeat(mean_M[:, None], blocks, 1),
        late_M=mean_M,
        window_MW=np.repeat(mean_M[:, None], len(starts(blocks)), 1),
        bank_KMB=np.empty((0, len(mean_M), blocks)),
    )
