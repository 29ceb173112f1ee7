"""The hidden cases: which faults, how strong, when, with which seed and under which recipe.

Nothing here is shared with the replays: seeds, the middle injection step and most strengths are others, and
three of seven incidents of a fault were recorded under a recipe that no replay used.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.engines.base import refusal
from proxy.specs import Recipe
from taxonomy.registry import FaultCard, Library

DEFAULT = "default"
RECIPES: Mapping[str, Recipe] = {
    DEFAULT: Recipe(),
    "lr": Recipe(lr=1.2e-4),
    "group_size": Recipe(group_size=6),
    "temperature": Recipe(temperature=1.0),
    "kl_coef": Recipe(kl_coef=0.05),
}
"""Recipes of incidents, by the setting in which they differ from that of the replays."""

CHANGED = tuple(name for name in RECIPES if name != DEFAULT)
MIDDLE = 24
"""Injection step of incidents that strike in the middle; replays have another."""

TWIN_SEEDS = (301, 302)
"""Healthy logs that an incident comes with."""

CALIBRATION_SEEDS = range(1001, 1021)
"""Healthy seeds of a changed recipe, from which detectability is decided before any diagnosis."""

HEALTHY_SEEDS = range(2001, 2201)
"""Unseen healthy seeds that play an incident."""

HEALTHY_CHANGED_SEEDS = range(2301, 2306)
"""The same for each changed recipe."""

PAIRS = 24


@dataclass(frozen=True)
class Incident:
    """One case, recorded from the original.

    Attributes:
        truth: The injected faults: none (healthy), one, or two.
        strength: Multiple of the cards' defaults.
        from_step: First faulty step.
        seed: Seed of the run.
        recipe: Name of its recipe.
    """

    truth: tuple[str, ...]
    strength: float
    from_step: int
    seed: int
    recipe: str = DEFAULT

    @property
    def id(self) -> str:
        """A readable name."""
        what = "+".join(self.truth) or "healthy"
        return f"{what}-x{self.strength:g}-f{self.from_step}-{self.recipe}-s{self.seed}"


def injectable(library: Library) -> list[FaultCard]:
    """Return the cards that the local engine can inject, in the library's order."""
    return [card for card in library.cards.values() if not refusal("local", card)]


def first_seed(fault: str, base: int) -> int:
    """Return where a fault's own seeds start: by its name, so that a new card moves nobody's seeds."""
    return base + 10 * (zlib.crc32(fault.encode()) % 90_000)


def plain_incidents(faults: Sequence[FaultCard], each: int = 4) -> Iterator[Incident]:
    """Yield incidents under the replays' recipe: once, half, twice the default from the start, once in the middle.

    Args:
        faults: Cards.
        each: Incidents of each fault, the first of those four.
    """
    for card in faults:
        seed = first_seed(card.id, 3_000_000)
        for number, (strength, step) in enumerate(((1.0, 1), (0.5, 1), (2.0, 1), (1.0, MIDDLE))[:each]):
            yield Incident((card.id,), strength, step, seed + number)


def changed_incidents(faults: Sequence[FaultCard]) -> Iterator[Incident]:
    """Yield incidents under changed recipes, in rotation: 0.7 and 1.4 from the start, once in the middle."""
    for turn, card in enumerate(faults):
        seed = first_seed(card.id, 4_000_000)
        for number, (strength, step) in enumerate(((0.7, 1), (1.4, 1), (1.0, MIDDLE))):
            recipe = CHANGED[(turn + number) % len(CHANGED)]
            yield Incident((card.id,), strength, step, seed + number, recipe)


def double_incidents(faults: Sequence[FaultCard], count: int = PAIRS) -> Iterator[Incident]:
    """Yield incidents with two faults of different categories at once, each fault as seldom as possible."""
    used: dict[str, int] = {card.id: 0 for card in faults}
    pairs = sorted(
        ((a, b) for i, a in enumerate(faults) for b in faults[i + 1 :] if a.category != b.category),
        key=lambda pair: zlib.crc32(f"{pair[0].id}+{pair[1].id}".encode()),
    )
    for number in range(min(count, len(pairs))):
        a, b = min(pairs, key=lambda pair: (used[pair[0].id] + used[pair[1].id], pairs.index(pair)))
        pairs.remove((a, b))
        used[a.id] += 1
        used[b.id] += 1
        yield Incident((a.id, b.id), 1.0, 1, 5_000_000 + number)


def healthy_incidents(seeds: Sequence[int] = HEALTHY_SEEDS, recipe: str = DEFAULT) -> Iterator[Incident]:
    """Yield healthy runs that are presented as incidents."""
    for seed in seeds:
        yield Incident((), 0.0, 1, seed, recipe)
