"""Clues: what a log alone, or the run's settings, say about a fault. The cards' companion for triage.

A card's signature is what an injected fault does to the metrics of a replay. `clues.yaml` adds what only shows in the
field: by *quantity* (`taxonomy.observations`), with the phase in which it can first be seen; the facts without which
the fault cannot be, or that rule it out, or make it likelier; and static checks of a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from taxonomy.facts import Facts, Scalar, holds
from taxonomy.observations import DIRECTIONS, ONSETS, PATTERNS, PHASES, QUANTITY
from taxonomy.registry import SAFE_LOADER

SIZES = ("small", "large")


class BadClue(ValueError):
    """An entry of clues.yaml that names something that does not exist."""


@dataclass(frozen=True)
class Sign:
    """What a fault does to one quantity.

    Attributes:
        of: Quantity.
        is_: Direction, in terms of the quantity.
        when: Onsets that are likely, empty for any.
        pattern: Pattern over time, "" for none.
        size: "small" or "large" for gaps, "" for any.
        weight: 2 for what the fault can hardly do without.
    """

    of: str
    is_: str
    when: tuple[str, ...] = ()
    pattern: str = ""
    size: str = ""
    weight: int = 1


@dataclass(frozen=True)
class Check:
    """A static check of a configuration: it points at the fault, whatever the log shows.

    Attributes:
        when: Conditions on facts, all of which must hold.
        says: What is wrong with it.
        source: Where that is known from.
    """

    when: Mapping[str, Scalar]
    says: str
    source: str = ""

    def found(self, facts: Facts) -> bool:
        """Return whether every condition is known to hold."""
        return all(key in facts and holds(condition, facts[key]) for key, condition in self.when.items())


@dataclass(frozen=True)
class Clues:
    """What triage knows about one fault beyond its card.

    Attributes:
        phase: "start" where it can be seen before any update, "update" where only from the first one on, "resume"
            where it strikes at one; "" for any.
        signs: By quantity; a sign here stands above what the card's signature says of the same quantity.
        requires: Quantities that must be out of order; where one is shown to be healthy, the fault is ruled out.
        needs: Facts without which the fault cannot be.
        excludes: Facts that rule it out.
        favours: Facts that make it likelier.
        checks: Static checks.
        look: The check on the failing system that costs least and changes nothing.
    """

    phase: str = ""
    signs: tuple[Sign, ...] = ()
    requires: tuple[str, ...] = ()
    needs: Mapping[str, Scalar] = field(default_factory=dict)
    excludes: Mapping[str, Scalar] = field(default_factory=dict)
    favours: Mapping[str, Scalar] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    look: str = ""


NO_CLUES = Clues()


def _clues(fault: str, raw: Mapping[str, Any]) -> Clues:
    """Build one entry, checking every name that it uses."""
    signs = tuple(
        Sign(
            item["of"],
            item["is"],
            tuple(str(item.get("when", "")).split("|")) if item.get("when") else (),
            item.get("pattern", ""),
            item.get("size", ""),
            int(item.get("weight", 1)),
        )
        for item in raw.get("signs", ())
    )
    quantities = {name for name, _ in QUANTITY.values()}
    for sign in signs:
        wrong = [word for word in sign.when if word not in ONSETS]
        wrong += [sign.is_] if sign.is_ not in DIRECTIONS else []
        wrong += [sign.pattern] if sign.pattern and sign.pattern not in PATTERNS else []
        wrong += [sign.size] if sign.size and sign.size not in SIZES else []
        wrong += [sign.of] if sign.of not in quantities and "/" not in sign.of else []
        if wrong:
            raise BadClue(f"clues of {fault}: unknown {', '.join(wrong)}")
    if raw.get("phase", "") not in ("", *PHASES) or not set(raw.get("requires", ())) <= quantities:
        raise BadClue(f"clues of {fault}: unknown phase or quantity")
    if extra := set(raw) - {"phase", "signs", "requires", "needs", "excludes", "favours", "checks", "look"}:
        raise BadClue(f"clues of {fault}: unknown {', '.join(sorted(extra))}")
    return Clues(
        raw.get("phase", ""),
        signs,
        tuple(raw.get("requires", ())),
        dict(raw.get("needs", {})),
        dict(raw.get("excludes", {})),
        dict(raw.get("favours", {})),
        tuple(Check(item["when"], item["says"], item.get("source", "")) for item in raw.get("checks", ())),
        raw.get("look", ""),
    )


@cache
def all_clues() -> Mapping[str, Clues]:
    """Return the clues by fault id.

    Raises:
        BadClue: An entry names something that does not exist.
    """
    text = files("taxonomy").joinpath("clues.yaml").read_text(encoding="utf-8")
    return {fault: _clues(fault, raw or {}) for fault, raw in yaml.load(text, Loader=SAFE_LOADER).items()}
