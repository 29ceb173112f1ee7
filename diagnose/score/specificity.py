"""Specificity: is the nearest candidate nearer than its rivals by more than chance, and what would split them.

Legend of shape suffixes: ``_D`` bootstrap draws, ``_C`` candidates, ``_M`` metrics, ``_B`` blocks, ``_K`` healthy
seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnose.curves import Array
from diagnose.score.distance import Signature, Space, coordinates, mean_square
from diagnose.score.settings import Settings


@dataclass(frozen=True)
class Gaps:
    """Distances of all candidates under resampling.

    Attributes:
        d_C: Distances, as observed.
        d_DC: Distances in every draw.
        least: Gap that two candidates must exceed to be told apart.
        tail: Probability in each tail of the interval.
    """

    d_C: Array
    d_DC: Array
    least: float
    tail: float

    def gap(self, this: int, other: int) -> tuple[float, float, float]:
        """Return (gap, low, high) = d(other) − d(this): positive where this one is nearer."""
        low, high = np.quantile(self.d_DC[:, other] - self.d_DC[:, this], [self.tail, 1 - self.tail])
        return float(self.d_C[other] - self.d_C[this]), float(low), float(high)

    def alike(self, this: int, other: int) -> bool:
        """Whether the two can't be told apart on this evidence."""
        _, low, high = self.gap(this, other)
        return low <= self.least and high >= -self.least

    def nearest_rival(self, others: Sequence[int]) -> int | None:
        """Return the one of some candidates that is nearest to the original, None of none."""
        return min(others, key=lambda c: float(self.d_C[c]), default=None)


def noise_curves(bank_KMB: Array, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return random healthy residual curves, shape (…, M, B), in noise units.

    Drawn from the seeds' own residual curves (which keep their correlation over blocks and over metrics) with
    random sign. Without seeds: one normal number a metric, constant over the blocks, the worst case.

    Args:
        bank_KMB: Residual curves, may be empty.
        shape: Wanted shape, ending in (M, B).
        rng: Generator.
    """
    lead, (metrics, blocks) = shape[:-2], shape[-2:]
    if len(bank_KMB) >= 2:
        picked = bank_KMB[rng.integers(len(bank_KMB), size=lead)]
        return np.asarray(picked * rng.choice([-1.0, 1.0], size=(*lead, 1, 1)))
    return np.broadcast_to(rng.standard_normal((*lead, metrics, 1)), (*lead, metrics, blocks))


def bootstrap(
    original: Signature,
    candidates: Sequence[Signature],
    where: Space,
    bank_O: Array,
    bank_P: Array,
    size: float,
    settings: Settings,
) -> Gaps:
    """Resample seeds and metrics together.

    Each draw adds healthy seed noise of the right variance to the original and to every candidate, and weighs
    the metrics at random with exponential weights (the Bayesian bootstrap: no metric ever drops out, so that a
    difference resting on one metric is not lost by lot). A draw uses one set of weights for all candidates.

    Args:
        original: The original's signature.
        candidates: The candidates' signatures, in an order that does not depend on the caller's.
        where: Coordinates and weights.
        bank_O: Residual curves of the original's noise model, bank_KMB.
        bank_P: The same for the proxy.
        size: ‖q_O‖, see `distance.size`.
        settings: Thresholds.
    """
    rng = np.random.default_rng(settings.seed)
    draws, (metrics, blocks) = settings.draws, original.z_MB.shape
    noise = noise_curves(bank_O, (draws, metrics, blocks), rng)
    events_O = np.broadcast_to(original.event_MB, noise.shape)
    q_O = coordinates(original.z_MB + noise * original.noise_MB, events_O, settings)
    weight_DM = where.weight_M * rng.standard_exponential((draws, metrics))
    flat_O = coordinates(original.z_MB, original.event_MB, settings)
    d_DC, d_C = np.empty((draws, len(candidates))), np.empty(len(candidates))
    for c, candidate in enumerate(candidates):
        noise = noise_curves(bank_P, (draws, metrics, blocks), rng)
        events_P = np.broadcast_to(candidate.event_MB, noise.shape)
        q_P = coordinates(candidate.z_MB + noise * candidate.noise_MB, events_P, settings)
        d_DC[:, c] = np.sqrt(mean_square(q_O - q_P, where, weight_DM))
        d_C[c] = np.sqrt(
            mean_square(flat_O - coordinates(candidate.z_MB, candidate.event_MB, settings), where)
        )
    return Gaps(d_C, d_DC, settings.gap_share * size, (1 - settings.interval) / 2)


def apart(a: Signature, b: Signature) -> Array:
    """Return how far two candidates' runs are apart by metric, apart_M in noise units (see `splitting_metric`)."""
    noise_MB = np.maximum(np.sqrt(a.noise_MB**2 + b.noise_MB**2), 1.0)
    square_MB = np.nan_to_num((a.z_MB - b.z_MB) / noise_MB) ** 2
    counted_M = np.maximum((np.isfinite(a.z_MB) & np.isfinite(b.z_MB)).sum(1), 1)
    apart_M = np.sqrt(square_MB.sum(1) / counted_M)
    apart_M = np.where((np.abs(a.event_MB - b.event_MB) > 0.5).any(1), np.inf, apart_M)
    return np.asarray(apart_M)


def splitting_metric(
    a: Signature, b: Signature, metrics: tuple[str, ...], least: float
) -> tuple[str, float] | None:
    """Return the metric on which two candidates' proxy runs differ most, and by how many noise units.

    The largest standardized difference (root mean square over blocks), whether or not the original has the
    metric; one noise unit is the least that it is measured by, for metrics that never vary. A non-finite event in
    one of them alone beats everything. None below `least`.
    """
    apart_M = apart(a, b)
    best = int(apart_M.argmax()) if len(apart_M) else 0
    return (metrics[best], float(apart_M[best])) if len(apart_M) and apart_M[best] > least else None
