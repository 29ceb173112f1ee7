"""Synthetic incidents with a known truth: what the scoring's error rates are measured on.

``python -m diagnose.score.simulate [REPEATS] [--write]`` measures the rates that reports print, and with
``--write`` puts them into ``error_rate_table.py``.

Healthy metrics are a level, a drift and AR(1) noise, in transformed units, independent between metrics (the worst
case for a maximum over them) and with a standard deviation of three floors, so that no floor hides an error.

Legend of shape suffixes: ``_M`` metrics, ``_N`` steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from diagnose.curves import Array, Curves
from diagnose.result import Direction, Verdict
from diagnose.score.align import nanmedian
from diagnose.score.calibration import Calibration, SeedSet
from diagnose.score.effect import late
from diagnose.score.noise import Source
from diagnose.score.plan import Replay
from diagnose.score.score import score
from diagnose.score.settings import DEFAULT, Settings
from taxonomy.metrics import METRIC_BY_NAME, METRICS
from taxonomy.registry import Library


def ar1(rng: np.random.Generator, phi_M: Array, n: int) -> Array:
    """Return stationary AR(1) noise of unit variance, x_MN: x_t = φ·x_{t−1} + √(1 − φ²)·ε_t."""
    x_MN = rng.standard_normal((len(phi_M), n))
    root_M = np.sqrt(1 - phi_M**2)
    for t in range(1, n):
        x_MN[:, t] = phi_M * x_MN[:, t - 1] + root_M * x_MN[:, t]
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
        source: str = "simulated",
    ) -> Curves:
        """Return one run of n steps.

        Args:
            rng: Generator.
            n: Steps.
            effect: Metric → what the fault adds from step `start` on, in standard deviations of the noise: a
                number (a step) or values by update since activation, the last one held.
            start: First faulty step.
            source: Name of the run.
        """
        steps_N = np.arange(1, n + 1, dtype=float)
        x_MN = self.level_M[:, None] + self.drift_M[:, None] * (1 - np.exp(-3 * steps_N / n))
        x_MN = x_MN + self.sigma_M[:, None] * ar1(rng, self.phi_M, n)
        for name, size in (effect or {}).items():
            m = self.metrics.index(name)
            curve = np.atleast_1d(np.asarray(size, float))
            at = np.minimum(np.arange(max(n - start + 1, 0)), len(curve) - 1)
            x_MN[m, start - 1 :] += self.sigma_M[m] * curve[at]
        return Curves(
            source,
            steps_N,
            {name: self._raw(name, x_MN[m]) for m, name in enumerate(self.metrics)},
        )

    def runs(
        self,
        rng: np.random.Generator,
        count: int,
        n: int,
        effect: Mapping[str, Array | float] | None = None,
        start: int = 1,
    ) -> list[Curves]:
        """Return several runs."""
        return [self.run(rng, n, effect, start) for _ in range(count)]

    @staticmethod
    def _raw(name: str, x_N: Array) -> Array:
        """Invert the metric's transform."""
        metric = METRIC_BY_NAME[name]
        if metric.transform == "log10":
            return np.maximum(10**x_N - metric.epsilon, 0.0)
        if metric.transform == "logit":
            return 1 / (1 + np.exp(-x_N))
        return x_N


def late_spread(phi: float, n: int, blocks: int = 8, draws: int = 2000, seed: int = 0) -> float:
    """Return the standard deviation over seeds of the late-half median of unit AR(1) noise."""
    x_MN = ar1(np.random.default_rng(seed), np.full(draws, phi), n)
    edges = np.linspace(0, n, blocks + 1).astype(int)
    medians = np.stack([nanmedian(x_MN[:, a:b]) for a, b in pairwise(edges)], -1)
    return float(late(medians).std())


@dataclass(frozen=True)
class Setup:
    """How much is known of the noise: a row of the table of error rates.

    Attributes:
        source: Where the original's scale comes from.
        seeds: Healthy seeds behind it.
        original_healthy: Healthy logs of the original.
        proxy_calibration: Seeds in the proxy's calibration, 0 for none.
        original_calibration: Seeds in the original's calibration, 0 for none.
    """

    source: Source
    seeds: int
    original_healthy: int
    proxy_calibration: int = 0
    original_calibration: int = 0


SETUPS = (
    Setup(Source.CALIBRATED, 20, 3, 20, 20),
    Setup(Source.OWN_SEEDS, 10, 10),
    Setup(Source.OWN_SEEDS, 5, 5),
    Setup(Source.STAND_IN, 20, 1, 20),
    Setup(Source.WITHIN_RUN, 3, 3),
    Setup(Source.WITHIN_RUN, 2, 2),
    Setup(Source.WITHIN_RUN, 1, 1),
)
WORLDS = (((0.5, 0.8, 0.95), 60), ((0.95,), 60), ((0.95,), 100), ((0.5,), 40))
"""(autocorrelations of the metrics, updates); the table holds the worst of them."""


def measure(
    setup: Setup, phi: Sequence[float], n: int, repeats: int, seed: int = 0, settings: Settings = DEFAULT
) -> dict[str, float]:
    """Return the shares of healthy logs that are called faulty, left open, reproduced, or given any direction.

    Every repeat draws new seeds for everything, calibration included. Two faults with effects on four metrics
    each stand by as candidates.
    """
    rng = np.random.default_rng(seed)
    world = World.make(phi)
    count = dict.fromkeys(("called faulty", "inconclusive", "reproduced", "any direction"), 0)
    for _ in range(repeats):
        seeds = (
            SeedSet.from_curves(world.runs(rng, setup.proxy_calibration, n))
            if setup.proxy_calibration
            else None
        )
        own = (
            SeedSet.from_curves(world.runs(rng, setup.original_calibration, n))
            if setup.original_calibration
            else None
        )
        replays = [
            Replay(
                name, world.runs(rng, 2, n, dict.fromkeys(rng.choice(world.metrics, 4, replace=False), 8.0))
            )
            for name in ("a", "b")
        ]
        found = score(
            world.runs(rng, 1, n),
            world.runs(rng, setup.original_healthy, n),
            world.runs(rng, 2, n),
            replays,
            Library(),
            calibration=Calibration(seeds, "", "", own) if seeds is not None else None,
            settings=settings,
        )
        moved = any(
            item.original in (Direction.UP, Direction.DOWN) for item in found.ranking[0].metrics.values()
        )
        count["any direction"] += moved
        count["inconclusive"] += found.verdict is Verdict.INCONCLUSIVE
        count["called faulty"] += found.verdict not in (Verdict.NO_FAULT, Verdict.INCONCLUSIVE)
        count["reproduced"] += found.verdict in (Verdict.REPRODUCED, Verdict.REPRODUCED_NOT_SPECIFIC)
    return {name: hits / repeats for name, hits in count.items()}


def main(arguments: Sequence[str]) -> None:
    """Measure every setup in every world; print, and write the worst with ``--write``."""
    repeats = int(next((item for item in arguments if item.isdigit()), "200"))
    rows = []
    for setup in SETUPS:
        worst = dict.fromkeys(("called faulty", "any direction"), 0.0)
        for phi, n in WORLDS:
            found = measure(setup, phi, n, repeats)
            worst = {name: max(rate, found[name]) for name, rate in worst.items()}
            print(f"{setup.source:10} seeds {setup.seeds:2} φ {phi} n {n}: {found}", flush=True)
        rates = ", ".join(f"{worst[name]:.3f}" for name in ("called faulty", "any direction"))
        rows.append(f"    (Source.{setup.source.name}, {setup.seeds}): ({rates}),")
    if "--write" in arguments:
        text = (
            '"""Written by ``python -m diagnose.score.simulate '
            f'{repeats} --write``; do not edit."""\n\nfrom diagnose.score.noise import Source\n\n'
            "TABLE: dict[tuple[Source, int], tuple[float, float]] = {\n" + "\n".join(rows) + "\n}\n"
            '"""(source, seeds) → share of healthy logs called faulty, and given any direction."""\n'
        )
        Path(__file__).with_name("error_rate_table.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
