"""The terminal: stdout is data, stderr is narration.

Only text that passed through `literal` is printed, never as markup: strings come from other people's logs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diagnose.report.text import literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True)
class Terminal:
    """Where everything the program says goes.

    Attributes:
        verbosity: −1 says errors only, 0 progress, 1 also details.
        json_only: stdout is for one JSON document; tables are not printed.
        anonymizer: What everything that leaves the machine passes through (stdout, warnings, errors, reports,
            playbooks); None: as it is.
    """

    verbosity: int = 0
    json_only: bool = False
    anonymizer: Callable[[str], str] | None = None

    @property
    def live(self) -> bool:
        """Whether a moving display is welcome: a terminal, no CI, not asked to be quiet."""
        return (
            self.verbosity >= 0 and sys.stderr.isatty() and not _in_ci() and os.environ.get("TERM") != "dumb"
        )

    @property
    def interactive(self) -> bool:
        """Whether there is somebody to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty() and not _in_ci()

    def stderr(self) -> Console:
        """Return a rich console on stderr (NO_COLOR is honoured by rich; no markup, no highlighting)."""
        from rich.console import Console

        return Console(stderr=True, markup=False, highlight=False, emoji=False)

    def say(self, text: str, level: int = 0) -> None:
        """Print one line of narration, at verbosity `level` and above."""
        if self.verbosity >= level:
            print(literal(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say(self.outgoing(f"warning: {text}"))

    def error(self, message: str, mend: str = "") -> None:
        """Print an error, and what to do about it, whatever the verbosity."""
        for line in self.outgoing(
            message
        ).splitlines():  # a playbook tells all that is wrong with it, one a line
            print(f"error: {literal(line)}", file=sys.stderr, flush=True)
        if mend:
            print(f"mend: {literal(self.outgoing(mend))}", file=sys.stderr, flush=True)

    def data(self, text: str) -> None:
        """Print data: as it is, or anonymized."""
        text = self.outgoing(text)
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()

    def outgoing(self, text: str) -> str:
        """Return text as it may leave the machine."""
        return self.anonymizer(text) if self.anonymizer else text

    def json(self, value: object) -> None:
        """Print a JSON document; non-finite numbers become null."""
        import json

        from diagnose.report.json import finite

        self.data(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))

    def show(self, view: RenderableType, plain_width: int = 80) -> None:
        """Print a rich renderable as data: coloured on a terminal, plain and `plain_width` wide in a pipe."""
        from rich.console import Console

        width = None if sys.stdout.isatty() else plain_width
        console = Console(markup=False, highlight=False, emoji=False, width=width)
        with console.capture() as captured:
            console.print(view)
        self.data("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0, width: int = 120
    ) -> None:
        """Print a table whose last `numbers` columns are aligned to the right; the first column never wraps.

        In a pipe the table is at most `width` columns wide.
        """
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for index, title in enumerate(header):
            right = index >= len(header) - numbers
            table.add_column(title, justify="right" if right else "left", no_wrap=index == 0)
        for row in rows:
            table.add_row(*(Text(literal(cell) if cell.strip() == cell else cell) for cell in row))
        self.show(table, plain_width=width)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
