"""Directions: up, down, shown not to have moved, or undetermined.

Legend of shape suffixes: ``_M`` metrics, ``_B`` blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Array
from diagnose.result import Direction
from diagnose.score.effect import Effect
from diagnose.score.noise import Floors, Margin, Scale, noise_units, peak, t_quantile
from diagnose.score.settings import Settings
from diagnose.score.windows import penalties


@dataclass(frozen=True)
class Reading:
    """What one system did, metric by metric: effects with their noise.

    Attributes:
        effect: The effects.
        margin: The margin in force.
        se_MB: Standard errors of effect.e_MB.
        se_late_M: Standard errors of effect.late_M.
        limit_late_M: Margin of the late-half effect in transformed units.
        z_MB: Effects in noise units, `noise.noise_units`.
        z_late_M: The same for the late half.
        peak_M: `noise.peak`, signed: beyond ±c where the metric moved at any time.
        direction: By metric.
    """

    effect: Effect
    margin: Margin
    se_MB: Array
    se_late_M: Array
    limit_late_M: Array
    z_MB: Array
    z_late_M: Array
    peak_M: Array
    direction: tuple[Direction, ...]

    @property
    def moved_M(self) -> NDArray[np.bool_]:
        """Whether a metric moved, or turned non-finite, at any time."""
        return (np.abs(self.peak_M) > self.margin.c) | (self.effect.event_MB > 0).any(1)

    @property
    def largest(self) -> float:
        """Largest |z| over all metrics: what is held against the margin."""
        return float(np.abs(self.peak_M).max(initial=0.0))


def directions(
    late_M: Array,
    se_late_M: Array,
    peak_M: Array,
    bound_M: Array,
    c: float,
    quantile: float,
) -> tuple[Direction, ...]:
    """Decide directions.

    Up or down: the late half leaves its margin; failing that, two neighbouring blocks do (a transient). None: the
    interval late ± quantile · se lies inside ±bound, which is two one-sided tests. Otherwise undetermined.

    Args:
        late_M: Late-half effects.
        se_late_M: Their standard errors.
        peak_M: Signed peaks in noise units (`noise.peak`).
        bound_M: Equivalence bounds in transformed units.
        c: Margin in noise units.
        quantile: t quantile of the one-sided tests.
    """
    answer = []
    for late, se, peak_z, bound in zip(late_M, se_late_M, peak_M, bound_M, strict=True):
        if abs(peak_z) > c:
            answer.append(Direction.UP if peak_z > 0 else Direction.DOWN)
        elif np.isfinite(late) and np.isfinite(se) and abs(late) + quantile * se < bound:
            answer.append(Direction.NONE)
        else:
            answer.append(Direction.UNDETERMINED)
    return tuple(answer)


def read(effect: Effect, scale: Scale, margin: Margin, floors: Floors, settings: Settings) -> Reading:
    """Hold effects against their noise."""
    floor_M = floors.metric_M
    se_MB = np.sqrt(scale.sigma_MB**2 * effect.variance_MB + effect.doubt_MB**2)
    se_late_M = np.sqrt(scale.late_M**2 * effect.variance_late_M + effect.doubt_late_M**2)
    z_MB = noise_units(effect.e_MB, se_MB, floor_M[:, None], settings)
    z_late_M = noise_units(effect.late_M, se_late_M, floor_M, settings)
    se_window_MW = np.sqrt(scale.window_MW**2 * effect.variance_window_MW + effect.doubt_window_MW**2)
    z_MW = noise_units(effect.window_MW, se_window_MW, floors.window_MW, settings)
    peak_M = peak(z_MB, z_MW, settings)
    # A late half beyond its margin says which way a metric went, whatever it did on the way.
    least = margin.c + float(penalties(z_MB.shape[1], settings)[-1])
    late_decides = np.nan_to_num(np.abs(z_MW[:, -1])) > least
    peak_M = np.where(late_decides, np.copysign(peak_M, z_MW[:, -1]), peak_M)
    return Reading(
        effect=effect,
        margin=margin,
        se_MB=se_MB,
        se_late_M=se_late_M,
        limit_late_M=least * np.fmax(se_late_M, floor_M / settings.min_margin),
        z_MB=z_MB,
        z_late_M=z_late_M,
        peak_M=peak_M,
        direction=directions(
            effect.late_M,
            se_late_M,
            peak_M,
            np.maximum(settings.equivalence * scale.late_M, floor_M),
            margin.c,
            t_quantile(settings.equivalence_alpha, scale.dof),
        ),
    )
