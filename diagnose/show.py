"""What `diagnose faults` and `doctor` print: data for `--json`, and tables made of the same data."""

from __future__ import annotations

import shutil
import sys
import textwrap
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


def width() -> int:
    """Return the columns that text is set in: those of the terminal, 80 in a pipe and 100 at most."""
    return min(max(shutil.get_terminal_size().columns, 60), 100) if sys.stdout.isatty() else 80


def wrapped(text: str, label: str = "", indent: int = 0) -> str:
    """Return text broken at the width, its lines after the first below the end of the label."""
    return textwrap.fill(
        text,
        width(),
        initial_indent=f"{label:<{indent}}",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def engine_marks(card: FaultCard) -> str:
    """Return the first letter of every engine that can express a fault, "by hand" where none can."""
    able = [name[0].upper() if not why else " " for name, why in fault_data(card)["engines"].items()]
    return " ".join(able).rstrip() or "by hand"


def show_faults(cards: list[FaultCard], terminal: Terminal) -> None:
    """Print the taxonomy: the four categories, their faults, and which engine can express each."""
    from proxy.engines.base import CAPABILITIES, refusal
    from taxonomy.categories import CATEGORIES
    from taxonomy.symptoms import SYMPTOMS

    for category in CATEGORIES:
        terminal.data(category.title)
        terminal.data(wrapped(category.symptoms, "  symptoms", 12))
        terminal.data(wrapped(category.causes, "  causes", 12))
        for item in SYMPTOMS:
            if item.category == category.id:
                terminal.data(wrapped(item.title, f"  seen as   {item.id}: ", 12))
        rows = [(card.id, card.title, engine_marks(card)) for card in cards if card.category == category.id]
        if rows:
            terminal.data("")
            terminal.table(("fault", "what it is", "engines"), rows, width=width())
        terminal.data("")
    able = {name: sum(not refusal(name, card) for card in cards) for name in CAPABILITIES}
    counts = ", ".join(f"{name[0].upper()} {name} ({count})" for name, count in able.items())
    by_hand = sum(not card.injectable for card in cards)
    text = f"{len(cards)} faults. Engines that can inject one: {counts}; {by_hand} are checked by hand."
    terminal.data(wrapped(f"{text} One card in full: diagnose faults ID"))


def show_fault(card: FaultCard, terminal: Terminal) -> None:
    """Print one card in full."""
    from taxonomy.categories import CATEGORY_BY_ID

    def fact(label: str, text: str) -> None:
        terminal.data(wrapped(text, label, 15))

    terminal.data(wrapped(card.title, f"{card.id}: ", 2))
    terminal.data(f"{CATEGORY_BY_ID[card.category].title}\n\n{wrapped(card.mechanism)}\n\n")
    fact("seen as", ", ".join(card.symptoms))
    if card.injectable:
        uses = f", through {', '.join(card.uses)}" if card.uses else ""
        fact("injected", f"as {card.form.value} at the {card.stage.value} stage{uses}")
        for engine, why in fault_data(card)["engines"].items():
            fact(f"engine {engine}", why or "can express it")
    else:
        fact("injected", f"by no engine; it would act at the {card.stage.value} stage")
    for parameter in card.parameters:
        unit = f" {parameter.unit}" if parameter.unit else ""
        fact("strength", f"{parameter.name} = {parameter.default:g}{unit}: {parameter.meaning}")
        fact("", f"default from: {parameter.source}")
    if card.injectable:
        fact("proved by", f"{card.witness.name} above {card.witness.above:g}: {card.witness.meaning}")
    terminal.data("")
    terminal.table(
        ("expected of", "direction", "onset", "weight"),
        [(item.metric, item.direction, item.onset, str(item.weight)) for item in card.signature],
        numbers=1,
        width=width(),
    )
    terminal.data("")
    for rival in card.rivals:
        fact("looks like", f"{rival.fault}; told apart by {rival.metric}: {rival.why}")
    fact("fix", card.fix)
    if card.check_by_hand:
        fact("check by hand", card.check_by_hand)
    for index, source in enumerate(card.sources):
        fact("" if index else "sources", source)


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
