"""Fault cards: the knowledge about each fault, as data.

A card names its injection by a dotted path that only a worker resolves, so that listing faults needs no torch.
Cards come from the YAML files beside this package (one a category) and from third-party packages through the
entry-point group ``rl_diagnose.faults`` (a callable that returns an iterable of `FaultCard`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

import yaml

from taxonomy.categories import CATEGORY_BY_ID
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.stages import Form, Stage
from taxonomy.symptoms import SYMPTOM_BY_ID

ONSETS = ("immediate", "gradual", "delayed", "sudden")
DIRECTIONS = ("up", "down", "none")


class UnknownFault(ValueError):
    """A fault id that no card has."""


@dataclass(frozen=True)
class Parameter:
    """A fault parameter with a physical meaning.

    Attributes:
        name: Keyword of the injection.
        default: The default strength, taken from `source`.
        unit: Physical unit or "" for a count.
        meaning: One line for humans.
        source: Where the default comes from.
        minimum: Smallest allowed value.
        maximum: Largest allowed value.
        scaling: How `strength` acts: "proportional" (value × strength), "inverse" (value / strength) or "none".
        integer: Whether the value is rounded to a whole number.
    """

    name: str
    default: float
    meaning: str
    source: str
    unit: str = ""
    minimum: float = float("-inf")
    maximum: float = float("inf")
    scaling: str = "none"
    integer: bool = False

    def at(self, strength: float) -> float:
        """Return the value at `strength` times the default, clipped to the allowed range."""
        factor = {"proportional": strength, "inverse": 1 / strength, "none": 1.0}[self.scaling]
        value = min(max(self.default * factor, self.minimum), self.maximum)
        return float(round(value)) if self.integer else value


@dataclass(frozen=True)
class Expectation:
    """What the fault is expected to do to one metric: direction, onset, and how much the verdict leans on it."""

    metric: str
    direction: str
    onset: str
    weight: int = 1


@dataclass(frozen=True)
class Rival:
    """A look-alike and the metric (or probe) that tells the two apart."""

    fault: str
    metric: str
    why: str


@dataclass(frozen=True)
class WitnessRule:
    """The number, measured during a run, which proves that the fault took place.

    Attributes:
        name: Key in the engine's witness record.
        above: The fault counts as injected when the number is strictly greater.
        meaning: One line for humans.
    """

    name: str
    above: float
    meaning: str


@dataclass(frozen=True)
class FaultCard:
    """Everything known about one fault; see the module docstring."""

    id: str
    title: str
    category: str
    symptoms: tuple[str, ...]
    mechanism: str
    stage: Stage
    form: Form
    inject: str
    witness: WitnessRule
    signature: tuple[Expectation, ...]
    fix: str
    sources: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()
    rivals: tuple[Rival, ...] = ()
    check_by_hand: str = ""

    def values(self, strength: float = 1.0) -> dict[str, float]:
        """Return parameter values at `strength` times the card's defaults."""
        return {parameter.name: parameter.at(strength) for parameter in self.parameters}

    @property
    def primary(self) -> tuple[str, ...]:
        """Metrics the verdict leans on most."""
        return tuple(e.metric for e in self.signature if e.weight >= 2)


def _card(raw: dict[str, Any], category: str) -> FaultCard:
    """Build one card from its YAML mapping, checking every name it uses."""
    card = FaultCard(
        id=raw["id"],
        title=raw["title"],
        category=category,
        symptoms=tuple(raw["symptoms"]),
        mechanism=" ".join(raw["mechanism"].split()),
        stage=Stage(raw["stage"]),
        form=Form(raw["form"]),
        inject=raw["inject"],
        witness=WitnessRule(**raw["witness"]),
        signature=tuple(Expectation(**item) for item in raw["signature"]),
        fix=" ".join(raw["fix"].split()),
        sources=tuple(raw["sources"]),
        parameters=tuple(Parameter(**item) for item in raw.get("parameters", ())),
        rivals=tuple(Rival(**item) for item in raw.get("rivals", ())),
        check_by_hand=" ".join(raw.get("check_by_hand", "").split()),
    )
    assert category in CATEGORY_BY_ID, category
    for symptom in card.symptoms:
        assert symptom in SYMPTOM_BY_ID, f"{card.id}: symptom {symptom}"
    for expectation in card.signature:
        assert expectation.metric in METRIC_BY_NAME, f"{card.id}: metric {expectation.metric}"
        assert expectation.direction in DIRECTIONS, f"{card.id}: direction {expectation.direction}"
        assert expectation.onset in ONSETS, f"{card.id}: onset {expectation.onset}"
    return card


@dataclass(frozen=True)
class Library:
    """The cards in force, by id, in the order in which they were read."""

    cards: dict[str, FaultCard] = field(default_factory=dict)

    def __getitem__(self, fault: str) -> FaultCard:
        """Return a card; raises `UnknownFault` with the known ids."""
        if fault not in self.cards:
            raise UnknownFault(f"unknown fault {fault!r}; known: {', '.join(sorted(self.cards))}")
        return self.cards[fault]

    def without(self, *faults: str) -> Library:
        """Return the library with some cards taken out (open-set tests)."""
        return Library({id_: card for id_, card in self.cards.items() if id_ not in faults})


@cache
def library() -> Library:
    """Return the shipped cards and those of installed third-party packages."""
    cards: list[FaultCard] = []
    for category in CATEGORY_BY_ID:
        text = files("taxonomy").joinpath("cards", f"{category}.yaml").read_text(encoding="utf-8")
        cards += [_card(raw, category) for raw in yaml.safe_load(text) or ()]
    for point in entry_points(group="rl_diagnose.faults"):
        cards += point.load()()
    by_id = {card.id: card for card in cards}
    assert len(by_id) == len(cards), "two cards share an id"
    return Library(by_id)
