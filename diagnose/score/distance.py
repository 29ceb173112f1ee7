"""The ranking statistic: distance between two noise-whitened, squashed effect signatures.

One definition for every candidate: the same metrics (all ranking metrics of the original's log), the same
weights, the same blocks. A fault card never enters.

Legend of shape suffixes: ``_M`` metrics, ``_B`` blocks, ``_MBC`` metrics × blocks × channels, channel 0 the
squashed effect, channel 1 the non-finite event.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diagnose.curves import Array
from diagnose.score.direction import Reading
from diagnose.score.noise import Floors, Scale
from diagnose.score.settings import Settings
from taxonomy.metrics import METRIC_BY_NAME


@dataclass(frozen=True)
class Signature:
    """The effect of one experiment in noise units.

    Attributes:
        z_MB: Effects in standard deviations between seeds; NaN where nothing was logged.
        event_MB: Share of runs with non-finite values, 0 to 1.
        noise_MB: Standard deviation of z_MB, from the number of runs.
    """

    z_MB: Array
    event_MB: Array
    noise_MB: Array


@dataclass(frozen=True)
class Space:
    """Where signatures are compared: which coordinates, and how much each counts.

    Attributes:
        mask_MB: Coordinates that the original has and the proxy can have.
        weight_M: Weights, summing to 1; 0 where a metric has no coordinate.
    """

    mask_MB: NDArray[np.bool_]
    weight_M: Array


def units(scale: Scale, floors: Floors, settings: Settings) -> Array:
    """Return what one noise unit is, unit_MB in transformed units.

    The standard deviation between two seeds (not the standard error: two experiments with different numbers of
    runs must give one signature), but at least floor / floor_multiple.
    """
    return np.maximum(np.nan_to_num(scale.sigma_MB), floors.metric_M[:, None] / settings.floor_multiple)


def signature(reading: Reading, unit_MB: Array) -> Signature:
    """Return a reading as a signature."""
    return Signature(
        z_MB=reading.effect.e_MB / unit_MB,
        event_MB=reading.effect.event_MB,
        noise_MB=np.nan_to_num(reading.se_MB) / unit_MB,
    )


def squash(z: Array, settings: Settings) -> Array:
    """Return asinh(z · (1 − (τ/z)²)₊): nothing for noise, linear for small effects, logarithmic for large ones.

    The inner factor is the non-negative garrote with threshold τ = `garrote`: continuous, odd, zero for |z| ≤ τ,
    and hardly shrinking what lies well above it. The logarithm keeps one catastrophic metric from being the
    whole distance.
    """
    square = np.maximum(z * z, 1e-12)
    return np.arcsinh(z * np.maximum(1.0 - settings.garrote**2 / square, 0.0))


def coordinates(z_MB: Array, event_MB: Array, settings: Settings) -> Array:
    """Return q_MBC: squashed effects, and events at `event_size`; what was not logged is 0, no movement shown."""
    return np.stack([squash(np.nan_to_num(z_MB), settings), settings.event_size * event_MB], -1)


def space(
    original: Signature, proxy_has_M: NDArray[np.bool_], metrics: tuple[str, ...], settings: Settings
) -> Space:
    """Return the coordinates that count for every candidate.

    A metric counts when the original has logged it and the healthy proxy can log it. Weights are common to all
    candidates: k metrics of one kind weigh k^(−family_power) each.
    """
    mask_MB = (np.isfinite(original.z_MB) | (original.event_MB > 0)) & proxy_has_M[:, None]
    present_M = np.asarray(mask_MB.any(1))
    kinds = [METRIC_BY_NAME[name].kind for name in metrics]
    members = Counter(kind for kind, present in zip(kinds, present_M, strict=True) if present)
    weight_M = np.array(
        [
            members[kind] ** -settings.family_power if present else 0.0
            for kind, present in zip(kinds, present_M, strict=True)
        ]
    )
    return Space(mask_MB, weight_M / max(weight_M.sum(), 1e-12))


def mean_square(difference_MBC: Array, where: Space, weight_M: Array | None = None) -> Array:
    """Return Σ_m w_m · mean over the metric's blocks of |difference|², for any leading axes."""
    weight_M = where.weight_M if weight_M is None else weight_M
    per_block = (difference_MBC**2).sum(-1) * where.mask_MB
    per_metric = per_block.sum(-1) / np.maximum(where.mask_MB.sum(-1), 1)
    return np.asarray((per_metric * weight_M).sum(-1) / np.maximum(weight_M.sum(-1), 1e-12))


def distance(original: Signature, proxy: Signature, where: Space, settings: Settings) -> float:
    """Return d = √(Σ_m w_m · mean_b |q_O − q_P|²): 0 for the same signature, in units of squashed noise."""
    q_O = coordinates(original.z_MB, original.event_MB, settings)
    q_P = coordinates(proxy.z_MB, proxy.event_MB, settings)
    return float(np.sqrt(mean_square(q_O - q_P, where)))


def size(original: Signature, where: Space, settings: Settings) -> float:
    """Return ‖q_O‖: the distance to a candidate that does nothing at all."""
    return float(np.sqrt(mean_square(coordinates(original.z_MB, original.event_MB, settings), where)))
