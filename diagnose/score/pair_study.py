"""Two faults at once, simulated: are pairs named as pairs, and single faults never split into two?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from diagnose.curves import Array
from diagnose.result import Verdict
from diagnose.score.plan import Replay
from diagnose.score.score import score
from diagnose.score.settings import DEFAULT, Settings
from diagnose.score.simulate import World, calibrated
from taxonomy.registry import Library

Truth = Literal["pair", "single", "twin", "unknown"]
Effects = Mapping[str, Array]


@dataclass(frozen=True)
class PairRow:
    """One row of the table of two faults at once: counts out of `repeats`.

    Attributes:
        truth: What the incidents were: "pair" (two faults of the library), "single" (one), "twin" (one, whose near
            twin is replayed as well) or "unknown" (one that is not in the library).
        repeats: Simulated incidents.
        exact: The pair that is named is the true one.
        pair: Any pair is named.
        specific: One fault is called the specific cause.
        right: Among those, the true fault.
        first: A true fault is first in the ranking.
    """

    truth: str
    repeats: int
    exact: int
    pair: int
    specific: int
    right: int
    first: int


def _fault(world: World, rng: np.random.Generator, n: int) -> Effects:
    """Return the effect of a random fault: three to six metrics, steps or ramps of 8 to 25 standard deviations."""
    names = rng.choice(world.metrics, int(rng.integers(3, 7)), replace=False)
    ramp_N = np.linspace(0, 1, n)
    return {
        str(name): rng.choice([-1.0, 1.0])
        * rng.uniform(8, 25)
        * (ramp_N if rng.random() < 0.5 else np.ones(n))
        for name in names
    }


def _stretched(effects: Effects, rng: np.random.Generator, factor: float, spread: float) -> Effects:
    """Return effects whose amplitudes are off by factor · e^{±spread}, metric by metric."""
    return {
        name: factor * np.exp(spread * rng.standard_normal()) * curve_N for name, curve_N in effects.items()
    }


def _sum(a: Effects, b: Effects) -> Effects:
    return {name: np.asarray(a.get(name, 0.0)) + np.asarray(b.get(name, 0.0)) for name in {**a, **b}}


def pair_errors(
    truth: Truth,
    repeats: int = 50,
    *,
    faults: int = 8,
    n: int = 60,
    spread: float = 0.4,
    seed: int = 0,
    settings: Settings = DEFAULT,
) -> PairRow:
    """Count what incidents of one kind are taken for.

    The proxy reacts to every fault with amplitudes that are off by 0.7 · e^{±spread}, metric by metric. The original
    has one run, every fault two replays.

    Args:
        truth: What the incidents are.
        repeats: Incidents.
        faults: Faults in the library.
        n: Updates.
        spread: Spread of the amplitudes between the systems, natural logarithm.
        seed: Seed of the simulation.
        settings: Thresholds.
    """
    rng = np.random.default_rng(seed)
    world = World.make()
    exact = pair = specific = right = first = 0
    for _ in range(repeats):
        library = {f"fault_{k}": _fault(world, rng, n) for k in range(faults)}
        a, b = (str(name) for name in rng.choice(sorted(library), 2, replace=False))
        true = {"pair": {a, b}, "unknown": set[str]()}.get(truth, {a})
        effect = library[a] if truth != "pair" else _sum(library[a], library[b])
        if truth == "twin":
            extra = str(rng.choice([name for name in world.metrics if name not in library[a]]))
            library["twin"] = {**_stretched(library[a], rng, 1.0, 0.5), extra: np.full(n, 10.0)}
        if truth == "unknown":
            del library[a]
        replays = [
            Replay(name, world.runs(rng, 2, n, _stretched(effects, rng, 0.7, spread)))
            for name, effects in library.items()
        ]
        found = score(
            world.runs(rng, 1, n, effect),
            world.runs(rng, 3, n),
            world.runs(rng, 2, n),
            replays,
            Library(),
            calibration=calibrated(world, rng, 20, n),
            settings=settings,
        )
        best = found.ranking[0].fault
        pair += bool(found.together)
        exact += bool(true) and set(found.together) == true
        specific += found.verdict is Verdict.REPRODUCED
        right += found.verdict is Verdict.REPRODUCED and best in true
        first += best in true
    return PairRow(truth, repeats, exact, pair, specific, right, first)
