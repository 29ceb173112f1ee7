"""Sections of a report, as Markdown and on the terminal, and the header that says what a result rests on."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diagnose.console import Terminal
from diagnose.jobs import cores
from diagnose.lab import versions
from diagnose.provenance import scoring_key
from diagnose.score.settings import DEFAULT
from diagnose.selftest.stats import Estimate
from diagnose.selftest.summary import Figure
from proxy.specs import content_key


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: Heading.
        text: Paragraphs, each one string.
        header: Column titles of its table, empty for none.
        rows: Cells.
    """

    title: str
    text: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON-able data."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Section:
        """Return the section that `to_json` wrote."""
        rows = tuple(tuple(row) for row in raw["rows"])
        return Section(raw["title"], tuple(raw["text"]), tuple(raw["header"]), rows)


FIGURES = ("", "value", "95 % interval", "n", "bar", "")


def number(value: float, digits: int = 3) -> str:
    """Return a number in words fit for a table; a dash for what is not known."""
    return "–" if not math.isfinite(value) else f"{value:.{digits}f}"


def interval(estimate: Estimate, *, signed: bool = False) -> str:
    """Return an interval in words."""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return "–"
    return f"{estimate.low:{'+' if signed else ''}.3f} to {estimate.high:{'+' if signed else ''}.3f}"


def figure_row(figure: Figure) -> tuple[str, ...]:
    """Return the cells of a figure."""
    e = figure.estimate
    n = f"{e.n} ({e.faults} faults)" if e.faults else str(e.n)
    holds = {True: "holds", False: "**does not hold**", None: ""}[figure.holds]
    return figure.name, number(e.value), interval(e), n, figure.bar, holds


def figures(title: str, rows: Iterable[Figure], *text: str) -> Section:
    """Return a section with one line a figure."""
    return Section(title, text, FIGURES, tuple(map(figure_row, rows)))


def provenance(command: str) -> tuple[str, ...]:
    """Return what a result rests on: the command, the scoring's thresholds, the class of machine; no date, no path."""
    known = versions()
    machine = (
        f"{platform.system()}, {platform.machine()}, {cores()} of {os.cpu_count()} cores, "
        f"Python {known['python']}, torch {known['torch']}"
    )
    return (
        f"Written by `{command}`; do not edit.",
        f"Scoring: thresholds `{content_key(asdict(DEFAULT))}`, with its sources `{scoring_key()}`.",
        f"Machine: {machine}.",
    )


def markdown(title: str, command: str, sections: Sequence[Section]) -> str:
    """Return a report as Markdown."""
    lines = [f"# {title}", ""]
    for paragraph in provenance(command):
        lines += [paragraph, ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for paragraph in section.text:
            lines += [paragraph, ""]
        if section.header and section.rows:
            lines.append("| " + " | ".join(section.header) + " |")
            lines.append("|" + "---|" * len(section.header))
            lines += [
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in section.rows
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def show(sections: Sequence[Section], terminal: Terminal) -> None:
    """Print a report."""
    for section in sections:
        terminal.data(f"\n{section.title}")
        for paragraph in section.text:
            terminal.data(paragraph)
        if section.header and section.rows:
            plain = [tuple(cell.replace("**", "") for cell in row) for row in section.rows]
            terminal.table(section.header, plain)
