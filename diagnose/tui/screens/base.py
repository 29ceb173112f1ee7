"""What the full screens share: the application by its type, panes that take turns, and calls that may block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from textual.events import Resize
from textual.screen import Screen

from diagnose.errors import DiagnoseError
from diagnose.report.text import literal
from diagnose.tui.widgets import Message

if TYPE_CHECKING:
    from diagnose.tui.app import DiagnoseApp

T = TypeVar("T")
SIDE_BY_SIDE = 120
"""Columns of a terminal from which panes stand side by side: where the application's class `-wide` begins."""
HIGH = 42
"""Lines from which panes that hold a chart can stand over one another: where its class `-high` begins."""


class BaseScreen(Screen[None]):
    """A screen of the application, as against the windows over one."""

    PANES: tuple[str, ...] = ()
    """Ids of the panes of which a narrow terminal shows one."""
    LEAST_LINES = 0
    """Lines of a terminal that the panes need to stand side by side."""
    SIGNS: Mapping[str, str] = {}
    """Signs that the screen uses, and what they mean; `?` lists them."""

    @property
    def diagnose(self) -> DiagnoseApp:
        """The application."""
        return cast("DiagnoseApp", self.app)

    def __init__(self) -> None:
        """Make the screen."""
        super().__init__()
        self._pane = next(iter(self.PANES), "")

    def on_mount(self) -> None:
        """Show the first pane."""
        self._share()
        self.diagnose.settle(type(self).__name__)

    def on_resize(self, _: Resize) -> None:
        """Show what the new width has room for."""
        self._share()

    def show_pane(self, name: str) -> None:
        """Show a pane (on a narrow terminal instead of the others)."""
        self._pane = name
        self._share()

    def _share(self) -> None:
        """Say of each pane whether it is there.

        By its own style and not by a class: a class has the rules applied anew to all that is in the pane, which was
        most of the time between a key and what it does.
        """
        wide = self.app.size.width >= SIDE_BY_SIDE and self.app.size.height >= self.LEAST_LINES
        for name in self.PANES:
            for pane in self.query(f"#{name}"):
                pane.display = wide or name == self._pane

    def ask(
        self,
        group: str,
        call: Callable[[], T],
        then: Callable[[T], object],
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Call something that may block in a thread of its own, and go on with what it returns.

        Args:
            group: A later call of the same group takes the place of an earlier one.
            call: What is called in the thread.
            then: Takes its result, in the screen's own thread.
            failed: Takes an error that is meant for users; None: it is shown in a notice.
        """

        def thread() -> None:
            try:
                result = call()
            except (DiagnoseError, OSError) as error:
                self.app.call_from_thread(failed or self.notify_error, error)
                return
            self.app.call_from_thread(then, result)

        self.run_worker(thread, thread=True, exclusive=True, group=group)

    def notify_error(self, error: Exception) -> None:
        """Show an error in a notice."""
        self.notify(literal(error), severity="error", markup=False)

    def say_error(self, error: Exception) -> None:
        """Show an error, and what to do about it, in the screen's own lines of text."""
        self.query_one(Message).fail(error)
