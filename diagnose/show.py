"""What `diagnose faults` and `doctor` print: data for `--json`, and tables made of the same data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diagnose.console import Terminal

if TYPE_CHECKING:
    from diagnose.doctor import Check
    from taxonomy.registry import FaultCard

SCHEMA = 1


def fault_data(card: FaultCard) -> dict[str, Any]:
    """Return a card as data, with what each engine makes of it ("" where it can express it)."""
    from proxy.engines.base import CAPABILITIES, refusal

    engines = {engine: refusal(engine, card) for engine in CAPABILITIES}
    data = asdict(card) | {"stage": card.stage.value, "form": card.form.value, "engines": engines}
    for parameter in data["parameters"]:  # an open end of a range is no number in JSON
        parameter["minimum"] = None if parameter["minimum"] == float("-inf") else parameter["minimum"]
        parameter["maximum"] = None if parameter["maximum"] == float("inf") else parameter["maximum"]
    return data


def show_faults(cards: list[FaultCard], terminal: Terminal) -> None:
    """Print the taxonomy: the four categories, their faults, and which engine can express each."""
    from taxonomy.categories import CATEGORIES
    from taxonomy.symptoms import SYMPTOMS

    for category in CATEGORIES:
        terminal.data(f"{category.title}\n  symptoms: {category.symptoms}\n  causes: {category.causes}")
        seen = [(item.id, item.title) for item in SYMPTOMS if item.category == category.id]
        terminal.table(("symptom", "what is seen"), seen)
        rows = [
            (
                card.id,
                card.title,
                f"{card.form.value} at {card.stage.value}",
                ", ".join(name for name, why in fault_data(card)["engines"].items() if not why) or "none",
            )
            for card in cards
            if card.category == category.id
        ]
        if rows:
            terminal.table(("fault", "what it is", "injection", "engines"), rows)
        terminal.data("")


def show_fault(card: FaultCard, terminal: Terminal) -> None:
    """Print one card in full."""
    terminal.data(f"{card.id}: {card.title}")
    terminal.data(f"\n{card.mechanism}\n")
    terminal.data(f"category: {card.category}   symptoms: {', '.join(card.symptoms)}")
    terminal.data(f"injection: {card.form.value} at the {card.stage.value} stage")
    for engine, why in fault_data(card)["engines"].items():
        terminal.data(f"engine {engine}: {why or 'can express it'}")
    for parameter in card.parameters:
        unit = f" {parameter.unit}" if parameter.unit else ""
        terminal.data(f"parameter {parameter.name}: {parameter.default:g}{unit}, {parameter.meaning}")
        terminal.data(f"  default from: {parameter.source}")
    terminal.data(f"witness: {card.witness.name} above {card.witness.above:g}: {card.witness.meaning}\n")
    terminal.table(
        ("expected of", "direction", "onset", "weight"),
        [(item.metric, item.direction, item.onset, str(item.weight)) for item in card.signature],
        numbers=1,
    )
    for rival in card.rivals:
        terminal.data(f"\nlooks like {rival.fault}; told apart by {rival.metric}: {rival.why}")
    terminal.data(f"\nfix: {card.fix}")
    if card.check_by_hand:
        terminal.data(f"check by hand: {card.check_by_hand}")
    for source in card.sources:
        terminal.data(f"source: {source}")


def doctor_data(checks: list[Check]) -> dict[str, Any]:
    """Return the checks as data; `ok` is whether none failed."""
    return {
        "schema": SCHEMA,
        "ok": all(check.status != "fail" for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def show_doctor(checks: list[Check], terminal: Terminal) -> None:
    """Print the checks, each with its mend."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        terminal.data(f"{check.status:<6}  {check.name:<{width}}  {check.detail}")
        if check.mend:
            terminal.data(f"{'':<6}  {'':<{width}}  mend: {check.mend}")
