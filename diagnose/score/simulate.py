"""Synthetic runs with a known truth: what the scoring's error rates and its power are measured on.

Healthy metrics are a level, a drift and AR(1) noise, in transformed units, independent between metrics (the worst
case for a maximum over them) and with a standard deviation of three floors, so that no floor hides an error.

Legend of shape suffixes: ``_R`` runs, ``_M`` metrics, ``_N`` steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from diagnose.curves import Array, Curves
from diagnose.score.align import block_count, nanmedian
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.effect import late
from diagnose.score.settings import DEFAULT, Settings
from taxonomy.metrics import METRIC_BY_NAME, METRICS


def ar1(rng: np.random.Generator, phi_M: Array, n: int, runs: tuple[int, ...] = ()) -> Array:
    """Return stationary AR(1) noise of unit variance, (*runs, M, N): x_t = φ·x_{t−1} + √(1 − φ²)·ε_t."""
    x_MN = rng.standard_normal((*runs, len(phi_M), n))
    root_M = np.sqrt(1 - phi_M**2)
    for t in range(1, n):
        x_MN[..., t] = phi_M * x_MN[..., t - 1] + root_M * x_MN[..., t]
    return x_MN


@dataclass(frozen=True)
class World:
    """One synthetic system.

    Attributes:
        metrics: Canonical names.
        phi_M: Autocorrelation of the noise.
        sigma_M: Standard deviation of the noise, transformed units.
        level_M: Level at the start, transformed units.
        drift_M: Healthy change over the whole run, transformed units.
    """

    metrics: tuple[str, ...]
    phi_M: Array
    sigma_M: Array
    level_M: Array
    drift_M: Array

    @classmethod
    def make(cls, phi: Sequence[float] = (0.5, 0.8, 0.95), count: int = 20, noise: float = 1.0) -> World:
        """Return a world of the first `count` ranking metrics; the reward rises and so does the KL."""
        metrics = tuple(metric.name for metric in METRICS if metric.ranks)[:count]
        cards = [METRIC_BY_NAME[name] for name in metrics]
        sigma_M = noise * np.array([3 * card.floor for card in cards])
        low = {"log10": -2.0}
        level_M = np.array(
            [low.get(card.transform, 0.03 if card.kind == "mismatch" else 0.5) for card in cards]
        )
        drift_M = np.zeros(len(metrics))
        drift_M[0] = 8 * sigma_M[0]
        drift_M[[card.transform == "log10" and card.kind == "divergence" for card in cards]] = 1.0
        return cls(metrics, np.resize(np.asarray(phi, float), len(metrics)), sigma_M, level_M, drift_M)

    def run(
        self,
        rng: np.random.Generator,
        n: int,
        effect: Mapping[str, Array | float] | None = None,
        start: int = 1,
    ) -> Curves:
        """Return one run of n steps; arguments as in `runs`."""
        return self.runs(rng, 1, n, effect, start)[0]

    def runs(
        self,
        rng: np.random.Generator,
        count: int,
        n: int,
        effect: Mapping[str, Array | float] | None = None,
        start: int = 1,
    ) -> list[Curves]:
        """Return several runs of n steps.

        Args:
            rng: Generator.
            count: Runs.
            n: Steps.
            effect: Metric → what the fault adds from step `start` on, in standard deviations of the noise: a
                number (a step) or values by update since activation, the last one held.
            start: First faulty step.
        """
        steps_N = np.arange(1, n + 1, dtype=float)
        x_RMN = self.level_M[:, None] + self.drift_M[:, None] * (1 - np.exp(-3 * steps_N / n))
        x_RMN = x_RMN + self.sigma_M[:, None] * ar1(rng, self.phi_M, n, (count,))
        for name, size in (effect or {}).items():
            m = self.metrics.index(name)
            curve = np.atleast_1d(np.asarray(size, float))
            at = np.minimum(np.arange(max(n - start + 1, 0)), len(curve) - 1)
            x_RMN[:, m, start - 1 :] += self.sigma_M[m] * curve[at]
        return [
            Curves(
                "simulated",
                steps_N,
                {name: self._raw(name, x_MN[m]) for m, name in enumerate(self.metrics)},
            )
            for x_MN in x_RMN
        ]

    @staticmethod
    def _raw(name: str, x_N: Array) -> Array:
        """Invert the metric's transform."""
        metric = METRIC_BY_NAME[name]
        if metric.transform == "log10":
            return np.maximum(10**x_N - metric.epsilon, 0.0)
        if metric.transform == "logit":
            return 1 / (1 + np.exp(-x_N))
        return x_N


def calibrated(world: World, rng: np.random.Generator, seeds: int, n: int) -> Calibration:
    """Return new healthy seeds of both systems, which are alike here."""
    proxy, original = (SeedSet.from_curves(world.runs(rng, seeds, n)) for _ in range(2))
    return Calibration(proxy, "", "", original)


def late_spread(phi: float, n: int, settings: Settings = DEFAULT, draws: int = 4000, seed: int = 0) -> float:
    """Return the standard deviation over seeds of the late-half median (over blocks) of unit AR(1) noise."""
    x_MN = ar1(np.random.default_rng(seed), np.full(draws, phi), n)
    edges = np.linspace(0, n, block_count(n, settings) + 1).astype(int)
    medians = np.stack([nanmedian(x_MN[:, a:b]) for a, b in pairwise(edges)], -1)
    return float(late(medians).std())
