"""Planted effects: how often an effect of known size is found, and its onset with it.

Legend of shape suffixes: ``_N`` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnose.result import Direction
from diagnose.score.score import gather, lay
from diagnose.score.settings import DEFAULT, Settings
from diagnose.score.simulate import World, calibrated, late_spread
from taxonomy.registry import Library


@dataclass(frozen=True)
class Power:
    """One row of the table of planted effects.

    Attributes:
        phi: Autocorrelation of all metrics.
        updates: Updates of every run.
        effective: (1 − φ)·n / (1 + φ), the number of independent updates that n are worth.
        size: The effect, in standard deviations between seeds of the late-half median.
        runs: Faulty runs.
        seeds: Healthy seeds that the margin rests on.
        start: Share of the run before the effect sets in.
        repeats: Simulated experiments, each with new seeds for everything.
        found: Experiments in which the one metric that moves is given its direction.
        faulty: Experiments in which the log is called faulty for it.
        onset: Experiments, of those found, in which the onset lies within two blocks of the true one.
    """

    phi: float
    updates: int
    effective: float
    size: float
    runs: int
    seeds: int
    start: float
    repeats: int
    found: int
    faulty: int
    onset: int


def planted(
    phi: float,
    updates: int,
    *,
    size: float = 3.0,
    runs: Sequence[int] = (1, 2),
    seeds: int = 20,
    start: float = 0.0,
    metrics: int = 20,
    repeats: int = 200,
    seed: int = 0,
    settings: Settings = DEFAULT,
) -> tuple[Power, ...]:
    """Plant a lasting step in one metric of `metrics`, and count; one row for every number of faulty runs.

    The step sets in inside runs that are compared from their first update on. Healthy seeds are new in every
    repeat.

    Args:
        phi: Autocorrelation.
        updates: Updates of every run.
        size: Size of the step in standard deviations of the late-half median.
        runs: Numbers of faulty runs.
        seeds: Healthy seeds.
        start: Share of the run before the step.
        metrics: Metrics in the log, independent of each other.
        repeats: Experiments.
        seed: Seed of the simulation.
        settings: Thresholds.
    """
    rng = np.random.default_rng(seed)
    world = World.make((phi,), metrics)
    spread = late_spread(phi, updates, settings)
    first = 1 + round(start * updates)
    count = {number: [0, 0, 0] for number in runs}
    for _ in range(repeats):
        name = str(rng.choice(world.metrics))
        sign = float(rng.choice([-1.0, 1.0]))
        faulty = world.runs(rng, max(runs), updates, {name: sign * size * spread}, first)
        healthy = calibrated(world, rng, seeds, updates)
        others = world.runs(rng, 2, updates)
        for number in runs:
            given = gather(faulty[:number], [], others, [], Library(), calibration=healthy, settings=settings)
            laid = lay(given, 1)[0]
            m = laid.case.frame.metrics.index(name)
            seen = laid.case.original
            hit = seen.reading.direction[m] is (Direction.UP if sign > 0 else Direction.DOWN)
            block = updates / seen.clock.blocks
            onset = seen.onsets[m]
            count[number][0] += hit
            count[number][1] += hit and seen.reading.largest > laid.margin.fault
            count[number][2] += hit and onset is not None and abs(sum(onset) / 2 - first) <= 2 * block
    effective = (1 - phi) * updates / (1 + phi)
    return tuple(
        Power(phi, updates, effective, size, number, seeds, start, repeats, *count[number]) for number in runs
    )


WORLDS = ((0.3, 40), (0.5, 40), (0.8, 60), (0.8, 100), (0.9, 100), (0.95, 200), (0.95, 300))
"""(autocorrelation, updates), all with (1 − φ)·n / (1 + φ) ≥ 5."""
