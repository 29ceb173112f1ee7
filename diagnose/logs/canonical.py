"""Raw log keys → canonical metrics (`taxonomy.metrics`): renames, validation keys, scaled keys.

A canonical metric may be offered by several raw keys of a run (``actor/entropy`` and its old name
``actor/entropy_loss``). Each offer has a rank, and the best one wins per run; the others stay unmapped.
The tables themselves are in `diagnose.logs.names`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from taxonomy.metrics import METRIC_BY_NAME

_SCALED = re.compile(r"(?P<base>.+)\((?P<scale>[0-9.]+(?:[eE][-+]?[0-9]+)?)\)")
MAX_KEY = 1000
"""Longest raw key that is looked up, in characters."""


@dataclass(frozen=True)
class Offer:
    """What a raw key can stand for.

    Attributes:
        canonical: Canonical metric.
        rank: Smaller is preferred; 0 is the metric's own name.
        scale: Factor from the logged to the canonical value.
        digit: Size of the last digit that the framework prints, in logged units; 0 where it prints all.
    """

    canonical: str
    rank: int
    scale: float = 1.0
    digit: float = 0.0


@dataclass(frozen=True)
class Aliases:
    """The alias table of one log format.

    Attributes:
        names: Raw key → (canonical metric, rank).
        patterns: (pattern that the whole raw key must match, canonical metric, rank), tried in order.
        prefixes: What may stand before a key of `names` ("train/"); a key with its prefix in `names` goes first.
        scales: Raw key → factor from the logged to the canonical value, where it isn't 1.
        digits: Raw key → size of the last digit printed, for keys that the framework itself rounds.
    """

    names: Mapping[str, tuple[str, int]]
    patterns: tuple[tuple[re.Pattern[str], str, int], ...] = ()
    prefixes: tuple[str, ...] = ()
    scales: Mapping[str, float] = field(default_factory=dict)
    digits: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        targets = [name for name, _ in self.names.values()] + [name for _, name, _ in self.patterns]
        assert all(name in METRIC_BY_NAME for name in targets), targets
        assert self.scales.keys() | self.digits.keys() <= self.names.keys()

    def offer(self, raw: str) -> Offer | None:
        """Return what `raw` stands for, None for a key that is not known."""
        if len(raw) > MAX_KEY:
            return None
        if raw in METRIC_BY_NAME:
            return Offer(raw, 0)
        if raw in self.names:
            return Offer(*self.names[raw], self.scales.get(raw, 1.0), self.digits.get(raw, 0.0))
        for prefix in self.prefixes:
            if raw.startswith(prefix) and (offer := self._plain(raw[len(prefix) :])):
                return offer
        for pattern, canonical, rank in self.patterns:
            if pattern.fullmatch(raw):
                return Offer(canonical, rank)
        if scaled := _SCALED.fullmatch(raw):
            scale = _positive(scaled["scale"])
            base = self.offer(scaled["base"]) if scale else None
            return base and Offer(base.canonical, base.rank, base.scale * scale, base.digit)
        return None

    def _plain(self, raw: str) -> Offer | None:
        if raw not in self.names:
            return None
        return Offer(*self.names[raw], self.scales.get(raw, 1.0), self.digits.get(raw, 0.0))


def merged(tables: Iterable[Aliases]) -> Aliases:
    """Return one table for containers that any framework writes to (TensorBoard, W&B, MLflow, CSV).

    Earlier tables win the ranks; no two may disagree on what a key means.
    """
    names: dict[str, tuple[str, int]] = {}
    patterns: list[tuple[re.Pattern[str], str, int]] = []
    prefixes: dict[str, None] = {}
    scales: dict[str, float] = {}
    digits: dict[str, float] = {}
    for table in tables:
        for raw, target in table.names.items():
            known = raw in names
            assert names.setdefault(raw, target)[0] == target[0], f"{raw} means two things"
            assert not known or scales.get(raw, 1.0) == table.scales.get(raw, 1.0), f"{raw} has two units"
        patterns += table.patterns
        prefixes |= dict.fromkeys(table.prefixes)
        scales |= table.scales
        digits |= table.digits
    return Aliases(names, tuple(patterns), tuple(prefixes), scales, digits)


def _positive(text: str) -> float:
    """Return a finite positive number, 0 where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
