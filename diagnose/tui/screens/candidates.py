"""Third screen: which faults to try, how strong, with how many seeds and how much time."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Static

from diagnose.report.text import literal, number, seconds
from diagnose.report.words import metric_title
from diagnose.tui.keybar import KeyBar
from diagnose.tui.plan import Choice, Launched, Order, Plan
from diagnose.tui.screens.base import BaseScreen
from diagnose.tui.screens.dialogs import AskScreen, CardScreen, ConfirmScreen, number_between
from diagnose.tui.table import WIDE, RowTable
from diagnose.tui.widgets import Crumbs, Message
from taxonomy.symptoms import SYMPTOM_BY_ID

MAX_SEEDS = 20
MAX_STRENGTH = 1e6
MAX_BUDGET_S = 1e7


class CandidatesScreen(BaseScreen):
    """A table of candidate faults; the marked ones will be replayed."""

    SIGNS = {"[x]": "will be replayed", "[ ]": "will not", "✘": "cannot be replayed: the text below says why"}  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        Binding("space", "mark", "Mark", tooltip="Mark or unmark the fault under the cursor", id="mark"),
        Binding("a", "all", "All/none", tooltip="Mark all candidates in the list, or none", id="mark-all"),
        Binding("slash", "filter", "Filter", key_display="/", tooltip="Show some faults only", id="filter"),
        Binding("i", "card", "Card", tooltip="Show all that is known about the fault", id="card"),
        Binding(
            "t", "strength", "Strength", tooltip="Change how strong the fault is injected", id="strength"
        ),
        Binding("k", "seeds", "Seeds", tooltip="Change the number of seeds", id="seeds"),
        Binding("b", "budget", "Budget", tooltip="Change the time that replays may take", id="budget"),
        Binding("r", "start", "Run", tooltip="Build the proxy and replay the marked faults", id="start"),
        Binding(
            "escape",
            "back",
            "Back",
            key_display="esc",
            tooltip="Back to all faults, then to the symptoms",
            id="back",
        ),
    ]

    def __init__(self, plan: Plan) -> None:
        """Make the screen for a playbook that was read."""
        super().__init__()
        self._plan = plan
        self._marked = {choice.fault for choice in plan.choices if choice.selected and not choice.refused}
        self._strengths: dict[str, float] = {}
        self._seeds = plan.seeds
        self._budget_s = plan.budget_s
        self._filter = ""
        self._starting = False

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Crumbs(2)
        yield RowTable(
            {
                "mark": "",
                "fault": "fault",
                "category": "category",
                "strength": "strength",
                "cost": "cost",
                "metric": "told apart by",
                "why": "why",
            },
            {"why": 20, "metric": 13, "category": 8, "fault": 12},
            {"why", "cost"},
            id="faults",
            classes="panel",
        )
        yield Message(id="detail", classes="panel")
        yield Static(id="cost", markup=False)
        yield KeyBar()

    def on_mount(self) -> None:
        """Fill the table."""
        self._budget_s = self.diagnose.budgets.get(self._plan.path, self._plan.budget_s)
        self._fill()
        if not self._plan.choices:
            self.query_one(Message).say(
                "No fault in the library has this symptom.", "warn", "Go back and pick another symptom."
            )
        self.query_one(RowTable).focus()

    @property
    def _listed(self) -> list[Choice]:
        """The candidates that the filter lets through; every word must be somewhere in id, title or category."""
        words = self._filter.lower().split()
        return [
            choice
            for choice in self._plan.choices
            if all(word in f"{choice.fault} {choice.title} {choice.category}".lower() for word in words)
        ]

    def _strength(self, choice: Choice) -> float:
        return self._strengths.get(choice.fault, choice.strength)

    def _fill(self) -> None:
        """List the candidates anew."""
        table = self.query_one(RowTable)
        symptom = SYMPTOM_BY_ID.get(self._plan.symptom)
        title = symptom.title if symptom else "every fault"
        shown = f" (only “{literal(self._filter, 20)}”)" if self._filter else ""
        table.border_subtitle = Text(
            "[x] will be replayed  ✘ cannot be" + ("  + the nearest get more runs" if self._plan.race else "")
        )
        table.border_title = Text(literal(f"{self._plan.name}: {title}", 160) + shown)
        self._count()

    def _cells(self, choice: Choice) -> dict[str, Text]:
        mark = "✘" if choice.refused else "[x]" if choice.fault in self._marked else "[ ]"
        why = _against(choice) or choice.why or choice.mechanism
        changed = choice.fault in self._strengths
        runs = 1 if self._plan.race else self._seeds
        cost = "–" if choice.refused else f"{runs} run{'s' if runs > 1 else ''}"
        return {
            "mark": Text(mark, "bold"),
            "fault": Text(literal(choice.fault, 40)),
            "category": Text(literal(choice.category, 14)),
            "strength": Text(f"× {number(self._strength(choice))}", "bold" if changed else ""),
            "cost": Text(f"{cost}+" if self._plan.race and not choice.refused else cost),
            "metric": Text(metric_title(choice.metric) if choice.metric else "–"),
            "why": Text(literal(why, 160)),
        }

    def _count(self) -> None:
        """Bring marks up to date, and say what the choice will cost."""
        self.query_one(RowTable).put({choice.fault: self._cells(choice) for choice in self._listed})
        marked, seeds, steps = len(self._marked), self._seeds, self._plan.steps
        limit = f"at most {seconds(self._budget_s)}" if self._budget_s else "no time limit"
        if self._plan.race:
            # Those that fall behind stop after one replay: how many there will be in all is not known.
            text = f"{marked + seeds}+ runs of {steps} steps, {limit}"
        else:
            text = f"{seeds * (marked + 1)} runs of {steps} steps, {seeds} of them healthy, {limit}"
        text = f"{marked} of {len(self._plan.choices)} marked: {text}{self._shortage()}"
        self.query_one("#cost", Static).update(text if marked else "Mark at least one fault (space).")

    def _shortage(self) -> str:
        """Return what the time limit means for the marked candidates, as far as that is known beforehand."""
        from diagnose.pace import shortage

        plan, each = self._plan, 1 if self._plan.race else self._seeds
        counts = (len(self._marked), self._seeds, each)
        short = shortage(self._budget_s, plan.step_s, plan.steps, plan.workers, counts)
        return f": ⚠ {short}; b changes it" if short else ""

    def _current(self) -> Choice | None:
        row, listed = self.query_one(RowTable).cursor_row, self._listed
        return listed[row] if row < len(listed) else None

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        """Tell more about the fault under the cursor."""
        choice = self._current()
        if choice is not None:
            against = _against(choice)
            against = against[:1].upper() + against[1:]
            apart = f"Told apart by: {metric_title(choice.metric)}" if choice.metric else ""
            # What a narrow terminal has no room for is in the card.
            more = (
                choice.mechanism
                if self.app.size.width >= WIDE
                else "i shows what it is, its look-alikes and the fix."
            )
            self.query_one(Message).say(choice.title, "head", against, apart, choice.why, more)

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
        """Mark all that are listed, or none of them when all are marked."""
        possible = {choice.fault for choice in self._listed if not choice.refused}
        self._marked = self._marked - possible if possible <= self._marked else self._marked | possible
        self._count()

    def action_card(self) -> None:
        """Show the card of the fault under the cursor."""
        choice = self._current()
        if choice is not None:
            self.app.push_screen(CardScreen(self.diagnose.cards[choice.fault]))

    def action_filter(self) -> None:
        """Ask for the words that a fault must have."""
        hint = "words of id, title or category; empty: all"
        self.app.push_screen(AskScreen("Show only", self._filter, hint, self._no_match), self._filtered)

    def _no_match(self, value: str) -> str:
        kept, self._filter = self._filter, value
        found, self._filter = self._listed, kept
        return "" if found or not self._plan.choices else f"no candidate has {value!r}"

    def _filtered(self, value: str | None) -> None:
        if value is not None:
            self._filter = value
            self._fill()

    def action_strength(self) -> None:
        """Ask for the strength of the fault under the cursor."""
        choice = self._current()
        if choice is None:
            return
        parameters = self.diagnose.cards[choice.fault].parameters
        scaled = [p for p in parameters if p.scaling != "none"]
        if not scaled:
            self.notify("This fault has no strength: it is there or it is not.", markup=False)
            return
        means = "; ".join(f"{p.name} {number(p.default)} {p.unit}".strip() for p in scaled)
        self.app.push_screen(
            AskScreen(
                f"Strength of {choice.fault}",
                number(self._strength(choice)),
                f"a multiple of the default ({means}), above 0",
                lambda value: number_between(value, 0.0, MAX_STRENGTH),
            ),
            lambda value: self._strengthened(choice, value),
        )

    def _strengthened(self, choice: Choice, value: str | None) -> None:
        if value is not None:
            self._strengths[choice.fault] = float(value)
            self._marked.add(choice.fault)
            self._count()

    def action_seeds(self) -> None:
        """Ask for the number of seeds."""
        hint = f"a whole number from 1 to {MAX_SEEDS}: more seeds, firmer evidence"
        self.app.push_screen(
            AskScreen("Seeds of every replay", str(self._seeds), hint, _seeds_problem), self._seeded
        )

    def _seeded(self, value: str | None) -> None:
        if value is not None:
            self._seeds = int(value)
            self._count()

    def action_budget(self) -> None:
        """Ask for the time limit."""
        self.app.push_screen(
            AskScreen(
                "Seconds that the replays may take",
                number(self._budget_s),
                "0: no limit; what does not fit is listed as not tried",
                _budget_problem,
            ),
            self._budgeted,
        )

    def _budgeted(self, value: str | None) -> None:
        if value is not None:
            self._budget_s = self.diagnose.budgets[self._plan.path] = float(value)
            self._count()

    def action_back(self) -> None:
        """Back to all candidates where a filter hides some, else to the symptoms."""
        if self._filter:
            self._filtered("")
        else:
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
        strengths = {fault: self._strengths[fault] for fault in faults if fault in self._strengths}
        self.query_one(Message).say("Starting …")
        order = Order(faults, self._seeds, strengths, self._budget_s)
        self.ask(
            "launch", lambda: self.diagnose.backend.start(self._plan, order), self._launched, self._failed
        )

    def _failed(self, error: Exception) -> None:
        self._starting = False
        self.say_error(error)

    def _launched(self, launched: Launched) -> None:
        self._starting = False
        self.diagnose.show_run(launched)


def _seeds_problem(value: str) -> str:
    fits = value.isdecimal() and 1 <= int(value) <= MAX_SEEDS
    return "" if fits else f"a whole number from 1 to {MAX_SEEDS} is wanted, not {value!r}"


def _budget_problem(value: str) -> str:
    try:
        fits = 0 <= float(value) <= MAX_BUDGET_S
    except ValueError:
        fits = False
    wanted = f"0 for no limit, or a number of seconds up to {number(MAX_BUDGET_S)}, is wanted"
    return "" if fits else f"{wanted}, not {value!r}"


def _against(choice: Choice) -> str:
    """Return what speaks against replaying a fault, "" for nothing."""
    if choice.refused:
        return f"cannot be replayed: {choice.refused}"
    return f"ruled out by the log or its setting: {choice.ruled_out}" if choice.ruled_out else ""
