"""The verdict in plain words: headline, ranking, what the candidate under the cursor did, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import DataTable, Static

from diagnose.report.terminal import headline_view, metrics_view, reasons_view, verdict_text
from diagnose.report.text import literal, number, percent
from diagnose.report.words import best, order_note, replay_name, witness_word
from diagnose.result import Result
from diagnose.tui.table import RowTable


class Ranking(RowTable):
    """The ranking; paging scrolls the pane that it is in, which is longer than the table."""

    BINDINGS = [  # noqa: RUF012
        Binding(
            "pagedown",
            "scroll_pane(1)",
            "More",
            tooltip="Scroll down to reasons and advice",
            id="verdict-down",
        ),
        Binding("pageup", "scroll_pane(-1)", "Back up", tooltip="Scroll up", show=False, id="verdict-up"),
    ]

    def action_scroll_top(self) -> None:
        """Go to the first row, and to the top of the pane."""
        super().action_scroll_top()
        self.query_ancestor(VerdictPane).scroll_home(animate=False)

    def action_scroll_bottom(self) -> None:
        """Go to the last row, and to the end of the pane."""
        super().action_scroll_bottom()
        self.query_ancestor(VerdictPane).scroll_end(animate=False)

    def action_scroll_pane(self, pages: int) -> None:
        """Scroll the pane by a page."""
        pane = self.query_ancestor(VerdictPane)
        pane.scroll_relative(y=pages * (pane.scrollable_content_region.height - 2), animate=False)


class VerdictPane(VerticalScroll, can_focus=True):
    """Scrolls as a whole; the ranking's cursor decides whose metrics are shown."""

    @dataclass
    class Picked(Message):
        """The cursor is on another candidate."""

        fault: str

    def __init__(self, id: str, classes: str) -> None:  # noqa: A002  (Textual's own name)
        """Make the pane."""
        super().__init__(id=id, classes=classes)
        self.border_title = "3 Verdict"
        self._result: Result | None = None

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield Static(id="standing", markup=False)
        yield Static(id="headline")
        labels = ("#", "fault", "verdict", "distance", "agrees", "proof")
        table = Ranking({label: label for label in labels}, {"fault": 20}, id="ranking")
        table.display = False
        yield table
        yield Static(id="order", markup=False)
        yield Static(id="reasons")  # before the numbers: here one reads from the top
        yield Static(id="metrics-title", markup=False)
        yield Static(id="metrics")
        yield Static(id="note", markup=False)

    def show(self, result: Result | None, waiting: str) -> None:
        """Show a result, or why there is none yet.

        Args:
            result: The result.
            waiting: Without a result: why. With one: what may still change it, "" for nothing.
        """
        standing = self.query_one("#standing", Static)
        standing.display = result is not None and bool(waiting)
        standing.update(Text(literal(waiting), "bold"))
        # Said in the frame too: that stays in view wherever the pane is scrolled to.
        early = "so far" if result is not None and result.status != "completed" else "of before"
        self.border_title = f"3 Verdict {early}" if standing.display else "3 Verdict"
        if result is None:
            self.query_one("#headline", Static).update(Text(literal(waiting)))
        if result is self._result:
            return
        self._result = result
        table = self.query_one(Ranking)
        table.display = result is not None and bool(result.score.ranking)
        for name in ("#metrics-title", "#metrics", "#reasons", "#order"):
            self.query_one(name, Static).update("")
        if result is None:
            table.put({})
            return
        self.query_one("#headline", Static).update(headline_view(result))
        table.put(
            {
                str(rank): {
                    "#": Text(str(rank)),
                    "fault": Text(literal(replay_name(candidate.fault, candidate.severity), 60)),
                    "verdict": verdict_text(candidate.verdict),
                    "distance": Text(number(candidate.distance), justify="right"),
                    "agrees": Text(percent(candidate.agreement), justify="right"),
                    "proof": Text(witness_word(candidate)),
                }
                for rank, candidate in enumerate(result.score.ranking, 1)
            }
        )
        note = order_note(result)
        self.query_one("#order", Static).update(Text(note, "dim"))
        self.query_one("#order").display = bool(note)
        first = best(result)
        if first is not None:
            table.move_cursor(row=result.score.ranking.index(first))
            self._show_metrics(result, result.score.ranking.index(first))
        self.query_one("#reasons", Static).update(reasons_view(result))

    def enter(self) -> None:
        """Take the focus, with the headline in view."""
        table = self.query_one(Ranking)
        (table if table.display else self).focus(scroll_visible=False)
        self.scroll_home(animate=False)

    def show_reasons(self) -> None:
        """Scroll down to the sections of reasons and findings."""
        self.call_after_refresh(self.scroll_to_widget, self.query_one("#reasons"), top=True, animate=False)

    def note(self, text: str) -> None:
        """Keep a sentence at the end of the pane, such as where a report was written."""
        self.query_one("#note", Static).update(literal(text))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the metrics of the candidate under the cursor."""
        event.stop()
        result = self._result
        if result is not None and event.cursor_row < len(result.score.ranking):
            self._show_metrics(result, event.cursor_row)
            if self.query_one(Ranking).has_focus:
                picked = result.score.ranking[event.cursor_row]
                self.post_message(self.Picked(replay_name(picked.fault, picked.severity)))

    def _show_metrics(self, result: Result, index: int) -> None:
        candidate = result.score.ranking[index]
        title = f"What {literal(candidate.title, 80)} did" if candidate.metrics else ""
        self.query_one("#metrics-title", Static).update(title)
        reasons = Text("\n".join(f"• {literal(reason)}" for reason in candidate.reasons))
        self.query_one("#metrics", Static).update(metrics_view(candidate) if candidate.metrics else reasons)
