"""What the full screens share: the application by its type, panes that take turns, and calls that may block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from textual.screen import Screen

from diagnose.errors import DiagnoseError
from diagnose.report.text import literal
from diagnose.tui.widgets import Message

if TYPE_CHECKING:
    from diagnose.tui.app import DiagnoseApp

T = TypeVar("T")


class BaseScreen(Screen[None]):
    """A screen of the application, as against the windows over one."""

    PANES: tuple[str, ...] = ()
    """Ids of the panes of which a narrow terminal shows one."""
    SIGNS: Mapping[str, str] = {}
    """Signs that the screen uses, and what they mean; `?` lists them."""

    @property
    def diagnose(self) -> DiagnoseApp:
        """The application."""
        return cast("DiagnoseApp", self.app)

    def show_pane(self, name: str) -> None:
        """Show a pane (on a narrow terminal instead of the others)."""
        for pane in self.PANES:
            self.query_one(f"#{pane}").set_class(pane == name, "-active")

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
