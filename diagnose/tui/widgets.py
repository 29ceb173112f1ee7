"""Two small widgets that all screens share."""

from __future__ import annotations

import errno

from rich.text import Text
from textual.widgets import Static

from diagnose.report.text import literal

STEPS = ("Open", "Symptom", "Candidates", "Run and verdict")
_SIGN = {"fail": "✘ ", "warn": "! ", "head": "", "": ""}
_STYLE = {"fail": "bold red", "warn": "bold yellow", "head": "bold", "": ""}


class Crumbs(Static):
    """The first line: where in the flow the screen stands."""

    def __init__(self, step: int) -> None:
        """Make the line for one of the steps, counted from 0."""
        text = Text("diagnose  ", "bold")
        for index, name in enumerate(STEPS):
            text.append(" › " if index else " ", "dim")
            text.append(f"[{name}]" if index == step else name, "bold reverse" if index == step else "dim")
        super().__init__(text)


class Message(Static):
    """A few lines of text, always shown literally."""

    def say(self, first: str, style: str = "", *more: str) -> None:
        """Show lines; `style` of the first one is "", "head", "warn" or "fail"."""
        text = Text(_SIGN[style] + literal(first), _STYLE[style])
        for line in more:
            if line:
                text.append("\n" + literal(line), "not bold not reverse default")
        self.update(text)

    def fail(self, error: Exception) -> None:
        """Show an error and what to do about it."""
        said, mend = str(error), getattr(error, "mend", "")
        if isinstance(error, OSError):
            said = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
            mend = "Nothing is lost: make room, then try again." if error.errno == errno.ENOSPC else mend
        self.say(said, "fail", mend)
