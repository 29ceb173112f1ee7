"""Fault cards: the knowledge about each fault, as data.

A card names its injection by a dotted path that only a worker resolves, so that listing faults needs no torch.
Cards come from the YAML files beside this package (``cards/<category>.yaml`` or ``cards/<category>/*.yaml``) and from
third-party packages through the entry-point group ``rl_diagnose.faults`` (a callable that returns an iterable of
`FaultCard`). A fault that no engine can express keeps its card, with the form "none" and what to check by hand.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

import yaml

from taxonomy.categories import CATEGORY_BY_ID
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.remedies import REMEDY_BY_ID
from taxonomy.stages import Form, Stage
from taxonomy.symptoms import SYMPTOM_BY_ID

ONSETS = ("immediate", "gradual", "delayed", "sudden")
DIRECTIONS = ("up", "down", "none")
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader: the one in C where there is one, ten times as fast."""
SCALINGS = ("proportional", "inverse", "none")


class UnknownFault(ValueError):
    """A fault id that no card has."""


class BadCard(ValueError):
    """A card that contradicts itself, or names something that does not exist."""


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


BY_HAND = WitnessRule("none", float("inf"), "nothing is injected: it is checked by hand")
"""The witness of a card that no engine can express: never seen."""


@dataclass(frozen=True)
class FaultCard:
    """Everything known about one fault; see the module docstring.

    `uses` names the tensors or settings that the injection needs beyond what its stage and form say, so that an engine
    that lacks one refuses the fault instead of running it without effect. `remedies` are ids of `taxonomy.remedies`,
    tried by ``--try-fix``.
    """

    id: str
    title: str
    category: str
    symptoms: tuple[str, ...]
    mechanism: str
    stage: Stage
    form: Form
    signature: tuple[Expectation, ...]
    fix: str
    sources: tuple[str, ...]
    inject: str = ""
    witness: WitnessRule = BY_HAND
    parameters: tuple[Parameter, ...] = ()
    rivals: tuple[Rival, ...] = ()
    check_by_hand: str = ""
    uses: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def injectable(self) -> bool:
        """Whether there is an injection at all; which engine can express it says `proxy.engines.base.refusal`."""
        return self.form is not Form.NONE

    def values(self, strength: float = 1.0) -> dict[str, float]:
        """Return parameter values at `strength` times the card's defaults."""
        return {parameter.name: parameter.at(strength) for parameter in self.parameters}

    @property
    def primary(self) -> tuple[str, ...]:
        """Metrics the verdict leans on most."""
        return tuple(e.metric for e in self.signature if e.weight >= 2)


def _card(raw: dict[str, Any], category: str) -> FaultCard:
    """Build one card from its YAML mapping."""
    optional: dict[str, Any] = {"witness": WitnessRule(**raw["witness"])} if "witness" in raw else {}
    return FaultCard(
        id=raw["id"],
        title=raw["title"],
        category=category,
        symptoms=tuple(raw["symptoms"]),
        mechanism=" ".join(raw["mechanism"].split()),
        stage=Stage(raw["stage"]),
        form=Form(raw["form"]),
        inject=raw.get("inject", ""),
        signature=tuple(Expectation(**item) for item in raw["signature"]),
        fix=" ".join(raw["fix"].split()),
        sources=tuple(raw["sources"]),
        parameters=tuple(Parameter(**item) for item in raw.get("parameters", ())),
        rivals=tuple(Rival(**item) for item in raw.get("rivals", ())),
        check_by_hand=" ".join(raw.get("check_by_hand", "").split()),
        uses=tuple(raw.get("uses", ())),
        remedies=tuple(raw.get("remedies", ())),
        **optional,
    )


def faults_of(card: FaultCard) -> list[str]:
    """Return what is wrong with a card by itself, one line each; rivals are checked by `library`."""
    wrong = []
    if not re.fullmatch(r"[a-z][a-z0-9_]*", card.id):
        wrong.append(f"the id {card.id!r} is not in snake_case")
    if card.category not in CATEGORY_BY_ID:
        wrong.append(f"there is no category {card.category!r}")
    wrong += [f"there is no symptom {symptom!r}" for symptom in card.symptoms if symptom not in SYMPTOM_BY_ID]
    named = [item.metric for item in card.signature] + [rival.metric for rival in card.rivals]
    wrong += [f"there is no metric {metric!r}" for metric in named if metric not in METRIC_BY_NAME]
    for item in card.signature:
        if item.direction not in DIRECTIONS or item.onset not in ONSETS:
            wrong.append(f"{item.metric}: {item.direction}, {item.onset}")
    wrong += [f"there is no remedy {remedy!r}" for remedy in card.remedies if remedy not in REMEDY_BY_ID]
    for text in ("title", "mechanism", "fix", "sources", "symptoms", "signature"):
        if not getattr(card, text):
            wrong.append(f"it has no {text}")
    for parameter in card.parameters:
        if not parameter.minimum <= parameter.default <= parameter.maximum:
            wrong.append(f"{parameter.name}: {parameter.default:g} is out of its range")
        if parameter.scaling not in SCALINGS:
            wrong.append(f"{parameter.name}: there is no scaling {parameter.scaling!r}")
    if card.injectable != bool(card.inject):
        wrong.append('an injection and the form "none" exclude each other')
    if not card.injectable and not card.check_by_hand:
        wrong.append("it is neither injectable nor does it say what to check by hand")
    if card.injectable and card.witness is BY_HAND:
        wrong.append("an injection needs a witness")
    return wrong


@dataclass(frozen=True)
class Library:
    """The cards in force, by id, in the order in which they were read."""

    cards: dict[str, FaultCard] = field(default_factory=dict)

    def __getitem__(self, fault: str) -> FaultCard:
        """Return a card; raises `UnknownFault` with the ids that come close."""
        if fault not in self.cards:
            near = difflib.get_close_matches(fault[:100], self.cards, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see: diagnose faults"
            raise UnknownFault(f"unknown fault {fault!r}; {hint}")
        return self.cards[fault]

    def without(self, *faults: str) -> Library:
        """Return the library with some cards taken out (open-set tests)."""
        return Library({id_: card for id_, card in self.cards.items() if id_ not in faults})


def shipped() -> list[FaultCard]:
    """Return the cards that come with this package."""
    cards: list[FaultCard] = []
    home = files("taxonomy").joinpath("cards")
    for category in CATEGORY_BY_ID:
        found = [home.joinpath(f"{category}.yaml")]
        if (folder := home.joinpath(category)).is_dir():
            found += sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
        for file in found:
            if file.is_file():
                raws = yaml.load(file.read_text(encoding="utf-8"), Loader=SAFE_LOADER) or ()
                cards += [_card(raw, category) for raw in raws]
    return cards


@cache
def library() -> Library:
    """Return the shipped cards and those of installed third-party packages.

    Raises:
        BadCard: A card is wrong, or two share an id.
    """
    origin = [(card, "") for card in shipped()]
    for point in entry_points(group="rl_diagnose.faults"):
        origin += [(card, f" (from the entry point {point.name})") for card in point.load()()]
    by_id: dict[str, FaultCard] = {}
    for card, where in origin:
        wrong = faults_of(card)
        if card.id in by_id:
            wrong.append("another card has this id")
        if wrong:
            raise BadCard(f"fault card {card.id}{where}: {'; '.join(wrong)}")
        by_id[card.id] = card
    for card, where in origin:
        if unknown := [rival.fault for rival in card.rivals if rival.fault not in by_id]:
            raise BadCard(f"fault card {card.id}{where}: there is no rival {unknown[0]!r}")
    return Library(by_id)
