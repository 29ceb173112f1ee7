"""The application: screens on a stack, keys that hold everywhere, and the command palette."""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from diagnose.store import RunFolder
from diagnose.tui.plan import Backend, Launched
from diagnose.tui.screens.base import HIGH, SIDE_BY_SIDE
from diagnose.tui.screens.home import HomeScreen

if TYPE_CHECKING:
    from taxonomy.registry import Library


AGAIN_S = 3.0
"""Seconds in which a second Ctrl-C leaves."""


def run(run_dir: Path | None = None) -> int:
    """Show the TUI until the user leaves it, and return the exit code.

    Args:
        run_dir: Run folder to open first, None for the first screen.
    """
    from diagnose.tui.launch import SessionBackend

    app = DiagnoseApp(SessionBackend(), run_dir)
    app.owns_process = True
    app.run()
    for folder in app.watched:
        if folder.is_alive():
            print(f"the run goes on in {folder.path}", file=sys.stderr)
            print(
                f"watch it with: {shlex.join(['diagnose', 'run', '--resume', str(folder.path)])}",
                file=sys.stderr,
            )
    return app.return_code or 0


class DiagnoseApp(App[None]):
    """A viewer of run folders that can also make them."""

    TITLE = "diagnose"
    CSS_PATH = "diagnose.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (SIDE_BY_SIDE, "-wide")]  # noqa: RUF012  (Textual's own type)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall"), (HIGH, "-high")]  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        Binding("q", "quit", "Quit", tooltip="Leave; a run that is under way goes on", id="quit"),
        Binding(
            "question_mark",
            "help",
            "Help",
            key_display="?",
            tooltip="Show all keys of this screen",
            id="help",
        ),
    ]

    def __init__(
        self,
        backend: Backend,
        run_dir: Path | None = None,
        *,
        cards: Library | None = None,
        poll_s: float = 0.5,
    ) -> None:
        """Make the application.

        Args:
            backend: The program behind the screens.
            run_dir: Run folder to show first, None for the first screen.
            cards: Fault cards, None for the installed ones.
            poll_s: Seconds between two looks at a run folder, and so between two redraws.
        """
        super().__init__()
        self.backend = backend
        self.poll_s = poll_s
        self.watched: list[RunFolder] = []
        self.budgets: dict[Path, float] = {}  # by playbook, where the user set one: screens come and go
        self._interrupted_at = -AGAIN_S
        self._run_dir = run_dir
        self._cards = cards
        self._settled: set[str] = set()
        self.owns_process = False  # whether the garbage collector is ours to tune: `run` says so, tests don't

    @property
    def cards(self) -> Library:
        """The fault cards in force."""
        from taxonomy.registry import library

        return self._cards if self._cards is not None else library()

    def settle(self, stage: str) -> None:
        """Take all that is there by now (modules most of all) out of the garbage collector's rounds, once a stage.

        A full round over it holds the screen up for a tenth of a second, in the middle of somebody's typing. What is
        garbage at that moment stays, once a stage and not more often.
        """
        if self.owns_process and stage not in self._settled:
            self._settled.add(stage)
            self.call_after_refresh(gc.freeze)

    def on_mount(self) -> None:
        """Show the first screen, and the run that was asked for on top of it."""
        self.push_screen(HomeScreen())
        if self._run_dir is not None:
            self.show_run(Launched(RunFolder(self._run_dir)))

    def show_run(self, launched: Launched) -> None:
        """Put the run screen on top."""
        # Imported here, like every screen but the first: what the first paint doesn't need comes after it.
        from diagnose.tui.screens.run import RunScreen

        if launched.folder not in self.watched:
            self.watched.append(launched.folder)
        self.push_screen(RunScreen(launched))

    def action_help_quit(self) -> None:
        """Ctrl-C: the first one says what leaving means, a second one soon after leaves."""
        now = time.monotonic()
        if now - self._interrupted_at < AGAIN_S:
            self.exit()
            return
        self._interrupted_at = now
        self.notify(
            "Press Ctrl-C again to leave; a run that is under way goes on.", timeout=AGAIN_S, markup=False
        )

    def action_help(self) -> None:
        """Show the keys of the screen at hand."""
        from diagnose.tui.screens.dialogs import HelpScreen

        rows = [
            (self.get_key_display(active.binding), active.binding.description, active.tooltip)
            for active in self.screen.active_bindings.values()
            if active.binding.description and active.binding.id and not active.binding.system
        ]
        self.push_screen(HelpScreen(rows, getattr(self.screen, "SIGNS", {})))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer every key of the screen in the command palette too."""
        yield from super().get_system_commands(screen)
        for node, binding, enabled, tooltip in screen.active_bindings.values():
            if enabled and binding.id and binding.description and binding.action != "quit":
                run = partial(self.run_action, binding.action, node)
                yield SystemCommand(binding.description, tooltip or f"Key {binding.key}", run)
