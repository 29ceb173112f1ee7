"""First screen: open a playbook or a past run, and say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Tree
from textual.widgets.option_list import Option
from textual.widgets.tree import TreeNode

from diagnose.errors import DiagnoseError
from diagnose.report.text import literal
from diagnose.store import RunFolder
from diagnose.tui.launch import Launched, PastRun, Plan, PlaybookEntry
from diagnose.tui.screens.candidates import CandidatesScreen
from diagnose.tui.widgets import Crumbs, Message
from taxonomy.categories import CATEGORIES, Category
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.symptoms import SYMPTOM_BY_ID, SYMPTOMS, Symptom

if TYPE_CHECKING:
    from diagnose.tui.app import DiagnoseApp


class SymptomScreen(Screen[None]):
    """Playbooks and past runs on the left, the four categories with their symptoms on the right."""

    BINDINGS = [  # noqa: RUF012
        Binding(
            "o", "open_path", "Open file", tooltip="Type the path of a playbook or of a run folder", id="open"
        ),
        Binding(
            "c",
            "candidates",
            "Candidates",
            tooltip="Go on to the candidates for the marked symptom",
            id="candidates",
        ),
        Binding("f5", "reload", "Reload", tooltip="Look for playbooks and past runs again", id="reload"),
    ]

    def __init__(self) -> None:
        """Make the screen."""
        super().__init__()
        self._playbooks: tuple[PlaybookEntry, ...] = ()
        self._runs: tuple[PastRun, ...] = ()
        self._plan: Plan | None = None

    @property
    def diagnose(self) -> DiagnoseApp:
        """The application."""
        return cast("DiagnoseApp", self.app)

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Crumbs(0)
        with Horizontal(id="columns"):
            with Vertical(id="sources-box", classes="panel") as box:
                box.border_title = "Start from"
                yield Input(placeholder="path of a playbook or run folder", id="path", compact=True)
                yield OptionList(id="sources", markup=False)
            with Vertical(id="symptoms-box", classes="panel") as box:
                box.border_title = "What is wrong"
                yield Tree("symptoms", id="symptoms")
        yield Message(id="detail", classes="panel")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Fill the tree and start looking for playbooks and runs."""
        tree: Tree[Category | Symptom] = self.query_one("#symptoms", Tree)
        tree.show_root = False
        tree.guide_depth = 2
        for category in CATEGORIES:
            branch = tree.root.add(Text(category.title), category, expand=True)
            for symptom in SYMPTOMS:
                if symptom.category == category.id:
                    branch.add_leaf(Text(symptom.title), symptom)
        self.query_one("#sources").focus()
        self._welcome()
        self._load()

    def on_screen_resume(self) -> None:
        """Look again at past runs when the user comes back from one."""
        self._load()

    def action_reload(self) -> None:
        """Look for playbooks and runs again."""
        self._load()

    def action_open_path(self) -> None:
        """Go to the path field."""
        self.query_one("#path").focus()

    def action_candidates(self) -> None:
        """Go on with the marked symptom."""
        if self._plan is None:
            self.query_one(Message).say(
                "Pick a playbook first: it says where the logs and the checkpoint are.", "warn"
            )
        else:
            self.app.push_screen(CandidatesScreen(self._plan))

    @work(thread=True, exclusive=True, group="sources")
    def _load(self) -> None:
        try:
            playbooks, runs = self.diagnose.backend.playbooks(), self.diagnose.backend.past_runs()
        except (DiagnoseError, OSError) as error:
            self.app.call_from_thread(self.query_one(Message).fail, error)
            return
        self.app.call_from_thread(self._fill, playbooks, runs)

    def _fill(self, playbooks: tuple[PlaybookEntry, ...], runs: tuple[PastRun, ...]) -> None:
        if (playbooks, runs) == (self._playbooks, self._runs):
            return
        self._playbooks, self._runs = playbooks, runs
        sources = self.query_one("#sources", OptionList)
        sources.clear_options()
        sources.add_option(Option(Text("Playbooks", "bold"), disabled=True))
        for index, entry in enumerate(playbooks):
            sources.add_option(Option(_entry(entry.name, entry.symptom), id=f"playbook-{index}"))
        sources.add_option(Option(Text("Past runs" if runs else "No past runs", "bold"), disabled=True))
        for index, past in enumerate(runs):
            sources.add_option(Option(_entry(past.path.name, past.state), id=f"run-{index}"))
        sources.highlighted = 1 if playbooks else None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the picked playbook or run."""
        kind, _, index = (event.option.id or "").partition("-")
        if kind == "playbook":
            self._read(self._playbooks[int(index)].path)
        elif kind == "run":
            self.diagnose.show_run(Launched(RunFolder(self._runs[int(index)].path)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Open what was typed: a run folder by its session, everything else as a playbook."""
        text = event.value.strip()
        if not text:
            return
        path = Path(text).expanduser()
        if (path / "session.json").is_file():
            self.diagnose.show_run(Launched(RunFolder(path.resolve())))
        else:
            self._read(path)

    @work(thread=True, exclusive=True, group="plan")
    def _read(self, path: Path, symptom: str | None = None) -> None:
        """Read a playbook; `symptom` is what the engineer picked instead of the playbook's."""
        self.app.call_from_thread(self.query_one(Message).say, f"Reading {path} …")
        try:
            plan = self.diagnose.backend.plan(path, symptom)
        except (DiagnoseError, OSError) as error:
            self.app.call_from_thread(self.query_one(Message).fail, error)
            return
        self.app.call_from_thread(self._take, plan, symptom is not None)

    def _take(self, plan: Plan, go_on: bool) -> None:
        """Mark the plan's symptom in the tree, and go on when the engineer has already confirmed it."""
        self._plan = plan
        tree: Tree[Category | Symptom] = self.query_one("#symptoms", Tree)
        for node in _leaves(tree):
            assert isinstance(node.data, Symptom)
            marked = node.data.id == plan.symptom
            node.set_label(
                Text.assemble(("● " if marked else "", "bold"), (node.data.title, "bold" if marked else ""))
            )
            if marked:
                tree.move_cursor(node)
        title = SYMPTOM_BY_ID[plan.symptom].title if plan.symptom in SYMPTOM_BY_ID else plan.symptom
        self.query_one(Message).say(
            f"{plan.name}: {title}.",
            "head",
            *plan.facts,
            "enter goes on with the symptom under the cursor; pick another one if you disagree.",
        )
        if go_on:
            self.app.push_screen(CandidatesScreen(plan))
        else:
            tree.focus()

    def on_tree_node_selected(self, event: Tree.NodeSelected[Category | Symptom]) -> None:
        """Go on with the symptom that was picked."""
        symptom = event.node.data
        if not isinstance(symptom, Symptom):
            return
        if self._plan is None:
            self._explain(symptom, "Pick a playbook on the left to go on: it says where the logs are.")
        elif symptom.id == self._plan.symptom:
            self.app.push_screen(CandidatesScreen(self._plan))
        else:
            self._read(self._plan.path, symptom.id)

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Category | Symptom]) -> None:
        """Explain what is under the cursor, while somebody is looking there."""
        if not self.query_one("#symptoms").has_focus:
            return
        data = event.node.data
        if isinstance(data, Symptom):
            if self._plan is None or data.id != self._plan.symptom:
                self._explain(data)
            else:
                self.query_one(Message).say(
                    f"{data.title}.", "head", *self._plan.facts, "enter goes on with it."
                )
        elif isinstance(data, Category):
            self.query_one(Message).say(
                data.title, "head", f"Symptoms: {data.symptoms}", f"Causes: {data.causes}"
            )

    def _explain(self, symptom: Symptom, hint: str = "") -> None:
        metric = METRIC_BY_NAME[symptom.metric]
        way = "▲ up" if symptom.direction == "up" else "▼ down"
        self.query_one(Message).say(
            f"{symptom.title}.", "head", f"Seen best in {metric.title} ({metric.name}), {way}.", hint
        )

    def _welcome(self) -> None:
        self.query_one(Message).say(
            "Start from a playbook (a description of the incident) or look at a past run.",
            "head",
            "enter opens what is under the cursor, tab moves on, ? shows all keys.",
        )


def _entry(name: str, note: str) -> Text:
    return Text.assemble(f" {literal(name, 60)}", ("\n  " + literal(note, 60), "dim"))


def _leaves(tree: Tree[Category | Symptom]) -> list[TreeNode[Category | Symptom]]:
    return [leaf for branch in tree.root.children for leaf in branch.children]
