"""Second screen: which faults to try, with how many seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Label, Static

from diagnose.errors import DiagnoseError
from diagnose.report.text import literal, number
from diagnose.report.words import metric_title
from diagnose.tui.launch import Choice, Launched, Plan
from diagnose.tui.screens.dialogs import CardScreen, ConfirmScreen
from diagnose.tui.widgets import Crumbs, Message
from taxonomy.symptoms import SYMPTOM_BY_ID

if TYPE_CHECKING:
    from diagnose.tui.app import DiagnoseApp

MAX_SEEDS = 20


class CandidatesScreen(Screen[None]):
    """A table of candidate faults; the marked ones will be replayed."""

    BINDINGS = [  # noqa: RUF012
        Binding("space", "mark", "Mark", tooltip="Mark or unmark the fault under the cursor", id="mark"),
        Binding("a", "all", "All/none", tooltip="Mark all candidates, or none", id="mark-all"),
        Binding("i", "card", "Card", tooltip="Show all that is known about the fault", id="card"),
        Binding("e", "seeds", "Seeds", tooltip="Change the number of seeds, enter takes it", id="seeds"),
        Binding("r", "start", "Run", tooltip="Build the proxy and replay the marked faults", id="start"),
        Binding("escape", "back", "Back", key_display="esc", tooltip="Back to the symptoms", id="back"),
    ]

    def __init__(self, plan: Plan) -> None:
        """Make the screen for a playbook that was read."""
        super().__init__()
        self._plan = plan
        self._marked = {choice.fault for choice in plan.choices if choice.selected and not choice.refused}
        self._starting = False

    @property
    def diagnose(self) -> DiagnoseApp:
        """The application."""
        return cast("DiagnoseApp", self.app)

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Crumbs(1)
        symptom = SYMPTOM_BY_ID.get(self._plan.symptom)
        title = symptom.title if symptom else self._plan.symptom
        table: DataTable[Text] = DataTable(id="faults", cursor_type="row", classes="panel")
        table.border_title = Text(literal(f"{self._plan.name}: {title}", 74))
        yield table
        yield Message(id="detail", classes="panel")
        with Horizontal(id="budget"):
            yield Label("Seeds ")
            yield Input(str(self._plan.seeds), type="integer", max_length=2, id="seeds", compact=True)
            yield Static(id="cost")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Fill the table."""
        table: DataTable[Text] = self.query_one(DataTable)
        for key, label in (
            ("mark", ""),
            ("fault", "fault"),
            ("category", "category"),
            ("strength", "strength"),
            ("cost", "cost"),
            ("metric", "told apart by"),
            ("why", "why"),
        ):
            table.add_column(label, key=key)
        for choice in self._plan.choices:
            table.add_row(*self._cells(choice), key=choice.fault)
        if not self._plan.choices:
            self.query_one(Message).say(
                "No fault in the library has this symptom.", "warn", "Go back and pick another symptom."
            )
        table.focus()
        self._count()

    def _cells(self, choice: Choice) -> tuple[Text, ...]:
        mark = "✘" if choice.refused else "[x]" if choice.fault in self._marked else "[ ]"
        why = f"cannot be replayed: {choice.refused}" if choice.refused else choice.why
        return (
            Text(mark, "bold"),
            Text(literal(choice.fault, 32)),
            Text(literal(choice.category, 14)),
            Text(f"× {number(choice.strength)}"),
            Text(f"{self.seeds} run{'s' if self.seeds > 1 else ''}"),
            Text(metric_title(choice.metric) if choice.metric else "–"),
            Text(literal(why, 160)),
        )

    @property
    def seeds(self) -> int:
        """Seeds in force: what the field says, or the plan's where it says nothing usable."""
        text = self.query_one("#seeds", Input).value
        return min(int(text), MAX_SEEDS) if text.isdigit() and int(text) > 0 else self._plan.seeds

    def _count(self) -> None:
        """Say what the choice will cost."""
        table: DataTable[Text] = self.query_one(DataTable)
        for choice in self._plan.choices:
            for column, cell in zip(table.columns, self._cells(choice), strict=True):
                table.update_cell(choice.fault, column, cell)
        marked, seeds = len(self._marked), self.seeds
        runs = seeds * (marked + 1)
        text = (
            f"{marked} of {len(self._plan.choices)} marked: {runs} runs of {self._plan.steps} steps, "
            f"{seeds} of them healthy"
        )
        self.query_one("#cost", Static).update(Text(text if marked else "Mark at least one fault (space)."))

    def _current(self) -> Choice | None:
        table: DataTable[Text] = self.query_one(DataTable)
        return self._plan.choices[table.cursor_row] if self._plan.choices else None

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        """Tell more about the fault under the cursor."""
        choice = self._current()
        if choice is not None:
            refused = f"Cannot be replayed: {choice.refused}" if choice.refused else ""
            apart = f"Told apart by: {metric_title(choice.metric)}" if choice.metric else ""
            self.query_one(Message).say(choice.title, "head", refused, apart, choice.why)

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        """Enter marks too."""
        self.action_mark()

    def action_mark(self) -> None:
        """Mark or unmark the fault under the cursor."""
        choice = self._current()
        if choice is None:
            return
        if choice.refused:
            self.notify(literal(choice.refused), title="Cannot be replayed", severity="warning", markup=False)
            return
        self._marked ^= {choice.fault}
        self._count()

    def action_all(self) -> None:
        """Mark all, or none when all are marked."""
        possible = {choice.fault for choice in self._plan.choices if not choice.refused}
        self._marked = set() if self._marked == possible else possible
        self._count()

    def action_card(self) -> None:
        """Show the card of the fault under the cursor."""
        choice = self._current()
        if choice is not None:
            self.app.push_screen(CardScreen(self.diagnose.cards[choice.fault]))

    def action_seeds(self) -> None:
        """Go to the seeds field."""
        self.query_one("#seeds").focus()

    def on_input_changed(self, _: Input.Changed) -> None:
        """Recount."""
        self._count()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Take the number and go back to the table."""
        self.query_one("#seeds", Input).value = str(self.seeds)
        self.query_one(DataTable).focus()

    def action_back(self) -> None:
        """Back to the symptoms."""
        self.app.pop_screen()

    def action_start(self) -> None:
        """Start, after the playbook's commands were shown and allowed."""
        if not self._marked or self._starting:
            self.notify("Mark at least one fault." if not self._marked else "Already starting.", markup=False)
        elif self._plan.commands:
            question = "This playbook runs commands on this machine. Allow them?"
            self.app.push_screen(ConfirmScreen(question, self._plan.commands), self._allowed)
        else:
            self._start()

    def _allowed(self, yes: bool | None) -> None:
        if yes:
            self._start()

    def _start(self) -> None:
        self._starting = True
        faults = tuple(choice.fault for choice in self._plan.choices if choice.fault in self._marked)
        self.query_one(Message).say("Starting …")
        self._launch(faults, self.seeds)

    @work(thread=True, exclusive=True, group="launch")
    def _launch(self, faults: tuple[str, ...], seeds: int) -> None:
        try:
            launched = self.diagnose.backend.start(self._plan, faults, seeds)
        except (DiagnoseError, OSError) as error:
            self.app.call_from_thread(self._failed, error)
            return
        self.app.call_from_thread(self._launched, launched)

    def _failed(self, error: Exception) -> None:
        self._starting = False
        self.query_one(Message).fail(error)

    def _launched(self, launched: Launched) -> None:
        self._starting = False
        self.diagnose.show_run(launched)
