"""Reports: pure functions from a result (and its curves) to text, found by name.

A report is a function ``(Result, Evidence) -> str`` under a file-name ending. Third-party packages add theirs
through the entry-point group ``rl_diagnose.reports`` (a callable that returns an iterable of `Report`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diagnose.report.evidence import Evidence
    from diagnose.result import Result

Render = Callable[["Result", "Evidence"], str]


@dataclass(frozen=True)
class Report:
    """One output format.

    Attributes:
        name: Name on the command line and in the TUI.
        suffix: File-name ending, with the dot.
        render: Turns a result into the text of the file.
    """

    name: str
    suffix: str
    render: Render


_SHIPPED: dict[str, Report] = {}


def report(name: str, suffix: str) -> Callable[[Render], Render]:
    """Register the decorated function as a report."""

    def register(render: Render) -> Render:
        assert name not in _SHIPPED, f"two reports are called {name}"
        _SHIPPED[name] = Report(name, suffix, render)
        return render

    return register


@cache
def reports() -> dict[str, Report]:
    """Return all reports by name: the shipped ones, then those of installed packages."""
    from importlib.metadata import entry_points

    found = dict(_SHIPPED)
    for point in entry_points(group="rl_diagnose.reports"):
        for extra in point.load()():
            found.setdefault(extra.name, extra)  # a plugin never replaces a shipped format
    return found


# Imported inside the functions, so that asking for one format doesn't load the others (and numpy).
@report("json", ".json")
def _json(result: Result, evidence: Evidence) -> str:
    from diagnose.report.json import dumps

    return dumps(result)


@report("junit", ".xml")
def _junit(result: Result, evidence: Evidence) -> str:
    from diagnose.report.junit import to_junit

    return to_junit(result)


@report("markdown", ".md")
def _markdown(result: Result, evidence: Evidence) -> str:
    from diagnose.report.markdown import to_markdown

    return to_markdown(result)


@report("text", ".txt")
def _text(result: Result, evidence: Evidence) -> str:
    from diagnose.report.terminal import render

    return render(result)


@report("html", ".html")
def _html(result: Result, evidence: Evidence) -> str:
    from diagnose.report.html import to_html

    return to_html(result, evidence)
