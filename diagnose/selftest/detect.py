"""Could anybody have seen it: an incident's own movement against healthy seeds of its recipe, before any replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagnose.curves import Curves
from diagnose.score.align import (
    Clock,
    Contrast,
    block_count,
    first_update,
    frame,
    last_step,
    panel,
    points,
    ranking_metrics,
    resolutions,
)
from diagnose.score.calibration import SeedSet
from diagnose.score.direction import read
from diagnose.score.effect import effect
from diagnose.score.settings import DEFAULT, Settings
from diagnose.score.system import Healthy, floors, system


@dataclass(frozen=True)
class Movement:
    """How far an incident moved.

    Attributes:
        largest: Largest |z| over all metrics since the true first faulty step.
        margin: What healthy seeds of its recipe reach, at the level at which a log is called faulty.
        event: Whether it has non-finite values that healthy seeds don't have.
    """

    largest: float
    margin: float
    event: bool

    @property
    def detectable(self) -> bool:
        """Whether it moved more than healthy seeds do."""
        return self.event or self.largest > self.margin


def movement(
    faulty: Sequence[Curves],
    twins: Sequence[Curves],
    seeds: SeedSet | None,
    from_step: int,
    settings: Settings = DEFAULT,
) -> Movement:
    """Measure an incident against healthy runs of its own model under its own recipe.

    The clock starts at the true step, which the tester knows and the diagnosis does not.

    Args:
        faulty: The incident.
        twins: Its healthy logs.
        seeds: Calibration seeds of its recipe, at least 20 for a margin that is read off them; None where only the
            twins speak.
        from_step: First faulty step.
        settings: Thresholds.
    """
    own = Healthy.of(twins, seeds, settings)
    assert own.runs, "no healthy run to measure against"
    metrics = ranking_metrics(faulty)
    digits = resolutions(faulty, own.runs)
    cut = frame(metrics, Contrast.TWIN, digits, settings)
    start = max(from_step, first_update(faulty))
    horizon = max(min(last_step(faulty), last_step(own.runs)) - start + 1, 1)
    n = min(points(runs, start, start + horizon - 1) for runs in (faulty, own.runs))
    clock = Clock(start, horizon, block_count(n, settings))
    home = system(own, clock, cut)
    floor_M = floors(cut, (home.scale,), digits)
    home = home.with_maxima(floor_M, settings)
    margin = home.margin(len(metrics), settings)
    seen = read(
        effect(panel(faulty, clock, cut), home.reference, settings), home.scale, margin, floor_M, settings
    )
    return Movement(seen.largest, margin.fault, bool((seen.effect.event_MB > 0).any()))
