"""Second screen: what is wrong. The log's own answer is marked; the engineer may disagree."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical, VerticalScroll
from textual.widgets import Static, Tree
from textual.widgets.tree import TreeNode

from diagnose.report.text import literal
from diagnose.report.words import metric_title, onset_word
from diagnose.tui.keybar import KeyBar
from diagnose.tui.plan import Plan
from diagnose.tui.screens.base import BaseScreen
from diagnose.tui.screens.candidates import CandidatesScreen
from diagnose.tui.widgets import Crumbs, Message
from taxonomy.categories import CATEGORIES, Category
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import QUANTITY
from taxonomy.symptoms import SYMPTOM_BY_ID, SYMPTOMS, Symptom

_PANES = Binding.Group("Panes", compact=True)


class SymptomTree(Tree[Category | Symptom]):
    """A tree that says where a label goes on: the text below has it whole."""

    def render_label(self, node: TreeNode[Category | Symptom], base_style: Style, style: Style) -> Text:
        """Return the label, its end replaced by an ellipsis where the tree is too narrow."""
        label = super().render_label(node, base_style, style)
        depth, above = 0, node.parent
        while above is not None and (self.show_root or above is not self.root):
            depth, above = depth + 1, above.parent
        room = self.scrollable_content_region.width - depth * self.guide_depth
        if room > 0:  # laid out
            label.truncate(room, overflow="ellipsis")
        return label


class SymptomScreen(BaseScreen):
    """The four categories as a tree, the curve of the symptom under the cursor, and what is known besides."""

    PANES = ("tree", "curve", "context")
    SIGNS = {  # noqa: RUF012
        "●": "the symptom in force",
        "◆": "the log shows it too",
        "◇": "the log shows something akin to it, in another metric",
        "○ ●": "on the curve: original, healthy and faulty",
        "│": "on the curve: between the two lines it began",
    }
    BINDINGS = [  # noqa: RUF012
        Binding("1", "pane('tree')", "Symptoms", tooltip="Show the symptoms", id="pane-tree", group=_PANES),
        Binding("2", "pane('curve')", "Curve", tooltip="Show the curve", id="pane-curve", group=_PANES),
        Binding(
            "3",
            "pane('context')",
            "Context",
            tooltip="Show what is ruled out, and what to do now",
            id="pane-context",
            group=_PANES,
        ),
        Binding(
            "c",
            "candidates",
            "Candidates",
            tooltip="Go on to the candidates of the symptom under the cursor",
            id="candidates",
        ),
        Binding("escape", "back", "Back", key_display="esc", tooltip="Back to the first screen", id="back"),
    ]

    def __init__(self, plan: Plan) -> None:
        """Make the screen for a playbook that was read."""
        super().__init__()
        self._plan = plan
        self._shown = ""

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        from diagnose.tui.chart import OverlayChart

        yield Crumbs(1)
        with Container(id="panes", classes="symptom-panes"):
            with Vertical(id="tree", classes="panel pane") as box:
                box.border_title = "1 What is wrong, and since which step"
                box.border_subtitle = "● in force  ◆ in the log too  ◇ akin to it"
                yield SymptomTree("symptoms", id="symptoms")
            with Vertical(id="curve", classes="panel pane") as box:
                box.border_title = "2 Curve"
                yield OverlayChart()
            with VerticalScroll(id="context", classes="panel pane") as box:
                box.border_title = "3 Context"
                yield Static(id="context-text")
        yield Message(id="detail", classes="panel")
        yield KeyBar()

    def on_mount(self) -> None:
        """Fill the tree, mark the symptom in force."""
        tree: Tree[Category | Symptom] = self.query_one("#symptoms", Tree)
        tree.show_root = False
        tree.guide_depth = 2
        for category in CATEGORIES:
            branch = tree.root.add(Text(category.title), category, expand=True)
            for symptom in SYMPTOMS:
                if symptom.category == category.id:
                    branch.add_leaf(self._label(symptom), symptom)
        tree.focus()
        self.call_after_refresh(
            self._take, self._plan
        )  # a tree has lines, and so a cursor, once it is laid out

    def _label(self, symptom: Symptom) -> Text:
        """Return a leaf: a sign (see `SIGNS`), the onset where the log shows one, and the symptom."""
        seen = self._plan.seen.get(symptom.id)
        marked = symptom.id == self._plan.symptom
        sign = "● " if marked else "" if seen is None else "◇ " if self._akin(symptom) else "◆ "
        # In front, because what is too long for the pane is cut off at its end.
        onset = f"{onset_word(seen.onset)}: " if seen and seen.onset else ""
        return Text.assemble(
            (sign, "bold"), (onset, "dim"), (symptom.title, "bold" if marked or seen else "")
        )

    def _akin(self, symptom: Symptom) -> bool:
        """Whether the log shows a symptom only in a metric of another quantity than the one it is named after."""
        seen = self._plan.seen.get(symptom.id)
        if seen is None or not seen.metric:
            return False
        shown, named = (QUANTITY.get(name, (name, 1))[0] for name in (seen.metric, symptom.metric))
        return shown != named

    def _metric(self, symptom: Symptom) -> str:
        """Return the metric that shows a symptom in this log, else the one that it is named after."""
        seen = self._plan.seen.get(symptom.id)
        return seen.metric if seen is not None and seen.metric else symptom.metric

    def _take(self, plan: Plan) -> None:
        """Show a plan: its symptom in the tree, what is known besides."""
        self._plan = plan
        tree: Tree[Category | Symptom] = self.query_one("#symptoms", Tree)
        for node in _leaves(tree):
            assert isinstance(node.data, Symptom)
            node.set_label(self._label(node.data))
            if node.data.id == plan.symptom:
                tree.move_cursor(node)
        if plan.symptom not in SYMPTOM_BY_ID:
            self._say_none()
        self.query_one("#context-text", Static).update(context_view(plan))
        self._show_curve(plan.symptom)

    def _say_none(self) -> None:
        self.query_one(Message).say(
            "The log shows no symptom that is known here.",
            "warn",
            *self._plan.facts,
            "Pick one yourself if you see one, or c for every fault.",
        )

    def action_pane(self, name: str) -> None:
        """Show a pane (on a narrow terminal instead of the others) and put the focus into it."""
        self.show_pane(name)
        if name == "tree":
            self.query_one("#symptoms").focus()
        elif name == "context":
            self.query_one("#context").focus()
        else:
            self.set_focus(None)

    def action_back(self) -> None:
        """Back to the first screen."""
        self.app.pop_screen()

    def action_candidates(self) -> None:
        """Go on with the symptom under the cursor."""
        node = self.query_one("#symptoms", Tree).cursor_node
        self._go_on(node.data if node is not None else None)

    def on_tree_node_selected(self, event: Tree.NodeSelected[Category | Symptom]) -> None:
        """Go on with the symptom that was picked."""
        if isinstance(event.node.data, Symptom):
            self._go_on(event.node.data)

    def _go_on(self, symptom: Category | Symptom | None) -> None:
        if not isinstance(symptom, Symptom) or symptom.id == self._plan.symptom:
            self.app.push_screen(CandidatesScreen(self._plan))
        else:
            backend, path = self.diagnose.backend, self._plan.path
            self.ask("plan", lambda: backend.plan(path, symptom.id), self._picked, self.say_error)

    def _picked(self, plan: Plan) -> None:
        self._take(plan)
        self.app.push_screen(CandidatesScreen(plan))

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Category | Symptom]) -> None:
        """Explain what is under the cursor, and draw its curve."""
        data = event.node.data
        if isinstance(data, Symptom):
            self._explain(data)
            self._show_curve(data.id)
        elif isinstance(data, Category):
            self.query_one(Message).say(
                data.title, "head", f"Symptoms: {data.symptoms}", f"Causes: {data.causes}"
            )

    def _explain(self, symptom: Symptom) -> None:
        plan = self._plan
        metric = METRIC_BY_NAME[symptom.metric]
        way = "▲ up" if symptom.direction == "up" else "▼ down"
        seen = plan.seen.get(symptom.id)
        if seen:
            onset = f", from step {onset_word(seen.onset)}" if seen.onset else ""
            what = "something akin" if self._akin(symptom) else "it"
            shows = f"The log shows {what}: {metric_title(self._metric(symptom))} {seen.evidence}{onset}."
        else:
            shows = f"Seen best in {metric.title} ({metric.name}), {way}."
            if symptom.id == plan.symptom:
                shows += " The playbook names it; triage of the log does not find it."
            elif plan.seen:
                shows += " The log does not show it."
        disagree = "enter takes it instead of the one marked ●, if you disagree."
        hint = "enter goes on with it; 3 shows the setting." if symptom.id == plan.symptom else disagree
        self.query_one(Message).say(f"{symptom.title}.", "head", shows, hint)

    def _show_curve(self, symptom_id: str) -> None:
        """Draw the metric of a symptom, with the band in which the log's onset lies."""
        from diagnose.tui.chart import OverlayChart

        symptom = SYMPTOM_BY_ID.get(symptom_id)
        if symptom is None or self._plan.evidence is None or symptom_id == self._shown:
            return
        self._shown = symptom_id
        seen = self._plan.seen.get(symptom_id)
        metric = self._metric(symptom)
        self.query_one(OverlayChart).show(self._plan.evidence, None, metric, seen.onset if seen else None)
        self.query_one("#curve").border_title = Text(f"2 Curve: {metric_title(metric)}")


def context_view(plan: Plan) -> Text:
    """Return what is known besides the symptom: what to do now, what is ruled out, the setting."""
    text = Text()
    sections = (
        ("Do this now", plan.advice),
        ("Cheapest check, for the likeliest cause so far", (plan.look,) if plan.look else ()),
        ("Ruled out", tuple(f"{title}: {why}" for title, why in plan.ruled_out)),
        ("Setting", plan.facts),
    )
    for title, lines in sections:
        if lines:
            text.append(f"{title}\n", "bold")
            for line in lines:
                text.append(f"• {literal(line)}\n")
    return text if text.plain else Text("Nothing more is known.", "dim")


def _leaves(tree: Tree[Category | Symptom]) -> list[TreeNode[Category | Symptom]]:
    return [leaf for branch in tree.root.children for leaf in branch.children]
