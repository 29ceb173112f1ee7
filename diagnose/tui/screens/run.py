"""Fourth screen: watch a run folder, live or long finished, and read its verdict."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical
from textual.message import Message as TextualMessage
from textual.widgets import DataTable, Static
from textual.worker import get_current_worker

from diagnose.curves import Curves
from diagnose.report import reports
from diagnose.report.junit import to_junit
from diagnose.report.proxy import proxy_view
from diagnose.report.text import literal, number, seconds
from diagnose.report.words import best, metric_title, probes_found, remedies_found, replay_name
from diagnose.result import Candidate, Result
from diagnose.scoring import MANIFEST
from diagnose.store import read_json, write_text
from diagnose.tui.chart import OverlayChart, drawn_curves
from diagnose.tui.follow import Follower
from diagnose.tui.keybar import KeyBar
from diagnose.tui.logtail import literal_lines, log_files, tail_text
from diagnose.tui.model import RunRow, Snapshot
from diagnose.tui.plan import Cost, Launched
from diagnose.tui.screens.base import HIGH, BaseScreen
from diagnose.tui.screens.dialogs import (
    AskScreen,
    ConfirmScreen,
    FilterScreen,
    PickScreen,
    TextScreen,
    number_between,
)
from diagnose.tui.screens.verdict import VerdictPane
from diagnose.tui.table import RowTable
from diagnose.tui.widgets import Crumbs, Message
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.symptoms import SYMPTOM_BY_ID

_PANES = Binding.Group("Panes", compact=True)
MORE_S = "120"
"""Seconds that a spent budget is raised by, unless somebody types another number."""
WISHES = {
    "probe": ("Look for an experiment that tells the look-alikes apart?", "To tell them apart"),
    "try_fix": ("Try the remedies of the first candidate on the proxy?", "Would it help?"),
}
"""What can be tried beside the verdict: the question, and where the answer will stand."""


class RunScreen(BaseScreen):
    """Replays, chart and verdict of one run folder; three panes side by side, one at a time on a small terminal."""

    PANES = ("runs", "chart", "verdict")
    LEAST_LINES = HIGH
    SIGNS = {  # noqa: RUF012
        "· ▶ ✔ ✘ –": "queued, under way, done, failed, left out (the budget was spent)",
        "○ ●": "original, healthy and faulty",
        "□ ■": "proxy, healthy and faulty",
        "│": "between the two lines the incident began",
        "✔ ≈": "reproduced; reproduced, but not shown to be the only cause",
        "~ ✘": "only partly; not reproduced",
        "? ! ○": "inconclusive; not injected; no fault",
        "distance": "how far the replay's effects are from the incident's, in units of healthy noise: 0 is the same; "
        "a row that an exact metric denies comes last, however near",
        "agrees": "how much of what moved in the incident moved the same way in the replay; "
        "below 0: more of it went the other way",
        "proof": "seen: the fault left its own trace in the replay, so it did take place; "
        "injection says the same with the trace as measured",
        "▲ ▼ =": "above, below and within what healthy runs show",
    }
    BINDINGS = [  # noqa: RUF012
        Binding("1", "pane('runs')", "Runs", tooltip="Show the replays", id="pane-runs", group=_PANES),
        Binding("2", "pane('chart')", "Chart", tooltip="Show the curves", id="pane-chart", group=_PANES),
        Binding(
            "3", "pane('verdict')", "Verdict", tooltip="Show the verdict", id="pane-verdict", group=_PANES
        ),
        Binding("m", "metric", "Metric", tooltip="Pick the metric of the chart from a list", id="metric"),
        Binding(
            "n",
            "step_metric(1)",
            "Next metric",
            tooltip="Chart the next metric",
            show=False,
            id="metric-next",
        ),
        Binding(
            "p",
            "step_metric(-1)",
            "Last metric",
            tooltip="Chart the previous one",
            show=False,
            id="metric-last",
        ),
        Binding("e", "export", "Export", tooltip="Write a report file into the run folder", id="export"),
        Binding(
            "x", "proxy", "Proxy", tooltip="Show what the proxy was cut from and what it kept", id="proxy"
        ),
        Binding("l", "log", "Log", tooltip="Show what runner and workers said", id="log"),
        Binding(
            "f",
            "wish('try_fix')",
            "Try fix",
            tooltip="Try the remedies of the first candidate on the proxy; says first what that costs",
            id="fix",
        ),
        Binding(
            "d",
            "wish('probe')",
            "Distinguish",
            tooltip="Find the cheapest experiment that tells the look-alikes apart; says first what that costs",
            id="probe",
        ),
        Binding(
            "b",
            "more_time",
            "Budget",
            tooltip="Go on with a run that has spent its budget: give it more seconds",
            id="budget",
        ),
        Binding("z", "pause", "Pause", tooltip="Let no further replay start, or go on", id="pause"),
        Binding(
            "r", "retry", "Run again", tooltip="Run the failed replay under the cursor again", id="retry"
        ),
        Binding("s", "stop", "Stop", tooltip="Stop the run; what is done is kept", id="stop"),
        Binding("u", "resume", "Resume", tooltip="Do what is missing, and score", id="resume"),
        Binding("escape", "leave", "Leave", key_display="esc", tooltip="Leave; the run goes on", id="leave"),
    ]

    @dataclass
    class Fresh(TextualMessage):
        """The run folder has changed."""

        snapshot: Snapshot

    def __init__(self, launched: Launched) -> None:
        """Make the screen of a run folder, with its runner where this process started it."""
        super().__init__()
        self._launched = launched
        self._snapshot = Snapshot()
        self._metric = ""
        self._metric_picked = False
        self._fault: str | None = None
        self._shown: object = None
        self._shown_curves: tuple[Curves, ...] = ()
        self._wake = threading.Event()
        self._verdict_seen = False
        self._told: Result | None = None

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Crumbs(3)
        yield Static(id="stages", markup=False)
        yield Message(id="status")
        with Container(id="panes"):
            with Vertical(id="runs", classes="panel pane") as box:
                box.border_title = "1 Runs"
                yield RowTable(
                    {"run": "replay", "seed": "seed", "state": "state", "witness": "injection"},
                    {"run": 12, "state": 16},
                    id="rows",
                )
                yield Static(id="row-detail", markup=False)
            with Vertical(id="chart", classes="panel pane") as box:
                box.border_title = "2 Chart"
                yield OverlayChart()
            yield VerdictPane(id="verdict", classes="panel pane")
        yield KeyBar()

    def on_mount(self) -> None:
        """Set up the table and start following the folder."""
        self.query_one("#rows").focus()
        self._follow()

    def on_unmount(self) -> None:
        """Let the following thread end at once."""
        self._wake.set()

    @work(thread=True, exclusive=True, group="follow")
    def _follow(self) -> None:
        """Post a snapshot whenever the folder has changed, at most once in `poll_s`."""
        worker = get_current_worker()
        follower = Follower(self._launched.folder, self._launched.process)
        while not worker.is_cancelled and self.is_attached:
            snapshot = follower.poll()
            if snapshot is not None:
                self.post_message(self.Fresh(snapshot))
            self._wake.wait(self.diagnose.poll_s)

    def on_run_screen_fresh(self, message: Fresh) -> None:
        """Show a new snapshot."""
        self._snapshot = snapshot = message.snapshot
        view = snapshot.view
        self.query_one("#stages", Static).update(f"{literal(view.name, 40)}  {view.stage_line()}")
        self._show_status()
        self._show_rows()
        self._show_chart()
        for box in self.query(".pane"):
            box.border_subtitle = Text(literal(self._which(), 60))
        pane = self.query_one(VerdictPane)
        # A verdict that is there stays in view while a runner adds to it.
        pane.show(snapshot.result, self._waiting())
        # A runner that has just begun has not said so yet: only one that is gone has come to its end.
        ended = view.end == "completed" and not snapshot.alive
        if snapshot.result is not None and ended:
            if not self._verdict_seen:
                self._verdict_seen = True
                self.action_pane("verdict")
            self._announce(snapshot.result)
        self.refresh_bindings()
        self.diagnose.settle("curves")  # what reads them has come in by now

    def _announce(self, result: Result) -> None:
        """Say what came of that which was tried beside the verdict, and go to where it stands."""
        before, self._told = self._told, result
        if before is None or (before.remedies, before.probes) == (result.remedies, result.probes):
            return
        wish = "try_fix" if before.remedies != result.remedies else "probe"
        lines = remedies_found(result) if wish == "try_fix" else probes_found(result)
        self.notify(literal(lines[0]) if lines else "", title=WISHES[wish][1], markup=False, timeout=15)
        self.action_pane("verdict")
        self.query_one(VerdictPane).show_reasons()

    def _which(self) -> str:
        """Return which run this is: its folder, and when it began."""
        began = self._snapshot.view.began_t
        when = datetime.fromtimestamp(began).strftime("%d %b %H:%M") if began else ""
        return f"{self._launched.folder.path.name}, {when}" if when else self._launched.folder.path.name

    def _waiting(self) -> str:
        """Return why there is no verdict yet, or what may still change the one that there is; "" for its end."""
        view = self._snapshot.view
        result = self._snapshot.result
        if result is not None:
            if self._snapshot.alive:
                return "From before: a runner is at work again and will bring this up to date."
            if result.status != "completed":
                how = "failed" if result.status == "failed" else "was stopped"
                return f"On {view.count_line()}: the run {how}. u does the rest, and scores again."
            if view.end in ("failed", "interrupted"):
                return f"The verdict of before: the run was {view.end} since, and may still change it."
            if self._snapshot.outdated:
                command = f"diagnose score {self._launched.folder.path}"
                return f"Made by another version of the scoring, which may judge otherwise today: {command}"
            return ""
        if view.end in ("failed", "interrupted"):
            return f"There is no verdict: the run was {view.end}. {view.status_line(self._snapshot.alive)}"
        if not view.rows:
            return "No verdict yet: the proxy comes first, then the replays."
        return f"No verdict yet: {view.count_line()} so far."

    def _show_status(self) -> None:
        snapshot, status = self._snapshot, self.query_one("#status", Message)
        view = snapshot.view
        if snapshot.problem:
            status.say(snapshot.problem, "fail")
        else:
            style = "fail" if view.end == "failed" else "warn" if view.end == "interrupted" else ""
            spent = view.end == "completed" and view.left_out
            style = style or (
                "warn" if spent or (not view.end and not snapshot.alive) else "head" if view.end else ""
            )
            status.say(
                view.status_line(snapshot.alive, snapshot.budget_s, snapshot.race),
                style,
                "" if view.end else view.now,
            )

    def _show_rows(self) -> None:
        """Bring the table up to date."""
        rows = self._snapshot.view.rows
        self.query_one("#rows", RowTable).put({row.run: self._cells(row) for row in rows})
        self._show_row_detail()

    def _cells(self, row: RunRow) -> dict[str, Text]:
        state = row.state
        style = {"failed": "bold red", "done": "green", "started": "bold"}.get(row.status, "")
        name = f"{row.extra}: {row.name}" if row.extra else row.name
        return {
            "run": Text(literal(name, 60)),
            "seed": Text(str(row.seed), justify="right"),
            "state": Text(state if len(state) <= 32 else state[:31] + "…", style),
            "witness": Text(self._witness(row)),
        }

    def _witness(self, row: RunRow) -> str:
        """Say whether the injection was proved, by the card's own rule where there is a card."""
        if row.fault is None or row.status != "done":
            return "–"
        card = self.diagnose.cards.cards.get(row.fault)
        if card is None:
            return ", ".join(f"{literal(k, 20)} {number(v)}" for k, v in row.witness.items()) or "missing"
        value = row.witness.get(card.witness.name)
        if value is None:
            return "✘ missing"
        return f"✔ seen ({number(value)})" if value > card.witness.above else f"✘ not seen ({number(value)})"

    def _row(self) -> RunRow | None:
        tables = self.query("#rows")  # bindings are asked for before the screen is composed
        if not tables:
            return None
        table, rows = tables.first(DataTable), self._snapshot.view.rows
        return rows[table.cursor_row] if table.cursor_row < len(rows) else None

    def _show_row_detail(self) -> None:
        row = self._row()
        # Between the build and the first replay the table is empty: nobody should wonder why.
        waiting = "" if self._snapshot.view.end else "No replay yet: the proxy comes first."
        text = waiting if row is None else f"{row.run}: {row.state}"
        self.query_one("#row-detail", Static).update(literal(text))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Chart the fault under the cursor, in either table."""
        if event.data_table.id == "rows":
            row = self._row()
            if row is not None and row.fault is not None:
                self._fault = row.name
            self._show_row_detail()
            self.refresh_bindings()
        self._show_chart()

    def on_verdict_pane_picked(self, message: VerdictPane.Picked) -> None:
        """Chart the candidate picked in the ranking."""
        self._fault = message.fault
        self._show_chart()

    def _metrics(self) -> list[str]:
        """Return the metrics to choose from: ours in their order, those that rank first, then foreign ones."""
        present = self._snapshot.evidence.metrics
        order = {
            name: (not metric.ranks, index) for index, (name, metric) in enumerate(METRIC_BY_NAME.items())
        }
        return sorted(present, key=lambda name: order.get(name, (True, len(order))))

    def _show_chart(self) -> None:
        """Draw the chart, unless it would be the same one."""
        snapshot = self._snapshot
        metrics = self._metrics()
        if not self._metric_picked or self._metric not in metrics:
            symptom = SYMPTOM_BY_ID.get(snapshot.view.symptom)
            wanted = symptom.metric if symptom else ""
            self._metric = wanted if wanted in metrics or not metrics else metrics[0]
        fault = self._fault or self._default_fault()
        onset = None
        if snapshot.result is not None:
            ranking = snapshot.result.score.ranking
            found = [
                c.metrics.get(self._metric) for c in ranking if replay_name(c.fault, c.severity) == fault
            ]
            onset = found[0].onset_original if found and found[0] else None
        curves = drawn_curves(snapshot.evidence, fault)
        key = (fault, self._metric, onset, *map(id, curves))
        if key != self._shown:
            self._shown, self._shown_curves = key, curves  # kept alive, so that their ids stay theirs
            self.query_one(OverlayChart).show(snapshot.evidence, fault, self._metric, onset)
            box = self.query_one("#chart")
            who = f", {literal(fault, 60)}" if fault else ""
            box.border_title = Text(f"2 Chart: {metric_title(self._metric)}{who}")

    def _default_fault(self) -> str | None:
        """Return the candidate charted before anyone picked one: the best, or the first that has curves."""
        snapshot = self._snapshot
        first = best(snapshot.result) if snapshot.result else None
        if first is not None:
            return replay_name(first.fault, first.severity)
        return next(iter(snapshot.evidence.proxy_faulty), next(iter(snapshot.view.candidates), None))

    def action_pane(self, name: str) -> None:
        """Show a pane (on a narrow terminal instead of the others) and put the focus into it."""
        self.show_pane(name)
        if name == "runs":
            self.query_one("#rows").focus()
        elif name == "verdict":
            self.query_one(VerdictPane).enter()
        else:
            self.set_focus(None)

    def action_step_metric(self, step: int) -> None:
        """Chart the next or the previous metric."""
        metrics = self._metrics()
        if metrics:
            self._pick_metric(metrics[(metrics.index(self._metric) + step) % len(metrics)])

    def action_metric(self) -> None:
        """Search for a metric."""
        entries = {name: f"{metric_title(name)}  {literal(name, 60)}" for name in self._metrics()}
        if entries:
            self.app.push_screen(
                FilterScreen("Metric of the chart", entries, self._metric), self._metric_chosen
            )
        else:
            self.notify("There are no curves yet.", markup=False)

    def _metric_chosen(self, metric: str | None) -> None:
        if metric is not None:
            self._pick_metric(metric)
            self.action_pane("chart")

    def _pick_metric(self, metric: str) -> None:
        """Chart a metric from now on, instead of the symptom's."""
        self._metric, self._metric_picked = metric, True
        self._show_chart()

    def action_export(self) -> None:
        """Pick a report format."""
        if self._snapshot.result is None:
            self.notify("There is no result to export yet.", severity="warning", markup=False)
            return
        entries = {name: f"{name}: {self._target(report.suffix)}" for name, report in reports().items()}
        self.app.push_screen(PickScreen("Export as", entries, letters=True), self._export_picked)

    def _target(self, suffix: str) -> str:
        return f"report{suffix}"

    def _export_picked(self, name: str | None) -> None:
        if name is not None:
            self._export(name)

    @work(thread=True, exclusive=True, group="export")
    def _export(self, name: str) -> None:
        """Write one report; the result and the curves are those on the screen."""
        report, snapshot = reports()[name], self._snapshot
        assert snapshot.result is not None
        path = self._launched.folder.path / self._target(report.suffix)
        session = read_json(self._launched.folder.session)
        expect = session.get("expect") if isinstance(session, dict) else None
        try:
            if name == "junit":  # the one report that shows what the playbook expects
                text = to_junit(snapshot.result, expect)
            else:
                text = report.render(snapshot.result, snapshot.evidence)
            write_text(path, text)
        except OSError as error:
            self.app.call_from_thread(self._tell, f"Not written: {error}", "error")
            return
        self.app.call_from_thread(self.app.copy_to_clipboard, str(path))
        self.app.call_from_thread(self._tell, f"Written, and its path copied: {path}", "information")

    def _tell(self, text: str, severity: str) -> None:
        """Show a notice, and keep what it says in the verdict pane."""
        error = severity == "error"
        self.notify(literal(text), severity="error" if error else "information", markup=False, timeout=8)
        self.query_one(VerdictPane).note(text)

    def action_proxy(self) -> None:
        """Show the proxy's manifest."""
        manifest = read_json(self._launched.folder.proxy / MANIFEST)
        if isinstance(manifest, dict):
            self.app.push_screen(TextScreen("Proxy", proxy_view(manifest)))
        else:
            self.notify("The proxy is not built yet.", markup=False)

    def action_log(self) -> None:
        """Show the notes, then the end of each log file of the run folder."""
        text = Text()
        for note in self._snapshot.view.notes:
            text.append(f"{literal(note.text)} {literal(note.mend)}".rstrip() + "\n")
        for path in log_files(self._launched.folder.path):
            text.append(f"\n{path.name}\n", "bold")
            text.append(literal_lines(tail_text(path)) or "(empty)\n")
        self.app.push_screen(
            TextScreen("Log", text if text.plain else Text("Nothing was said yet."), end=True)
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide stop or resume, and grey out the export, when they make no sense at the moment."""
        snapshot = self._snapshot
        if action in ("stop", "pause"):
            return snapshot.alive
        if action == "wish":
            return self._can_wish(str(parameters[0]))
        if action == "more_time":
            return not snapshot.alive and snapshot.view.end == "completed" and snapshot.view.left_out > 0
        if action == "retry":
            row = self._row()
            return not snapshot.alive and row is not None and row.status == "failed"
        if action == "resume":
            return not snapshot.alive and snapshot.view.end != "completed"
        if action == "export":
            return True if snapshot.result is not None else None
        return True

    def action_pause(self) -> None:
        """Pause, or go on; replays that are under way end first."""
        self.ask("stop", lambda: self.diagnose.backend.pause(self._launched.folder), self._paused)

    def _paused(self, paused: bool) -> None:
        text = "Paused: replays under way end, no further one starts. z goes on." if paused else "Going on."
        self.notify(text, markup=False)

    def _can_wish(self, wish: str) -> bool:
        """Whether a finished run has something to probe, or a remedy to try."""
        snapshot = self._snapshot
        result = snapshot.result
        if result is None or result.status != "completed" or snapshot.alive:
            return False
        first = best(result)
        if first is None:
            return False
        if wish == "probe":
            return bool(first.rivals) and not self._probed(first)
        card = self.diagnose.cards.cards.get(first.fault)
        return card is not None and bool(card.remedies)

    def _probed(self, first: Candidate) -> bool:
        """Whether the verdict has the probes of all look-alikes that would be probed."""
        from diagnose.probes import MOST_RIVALS

        result = self._snapshot.result
        probed = {fault for probe in result.probes for fault in probe.faults} if result is not None else set()
        return probed >= {first.fault, *first.rivals[:MOST_RIVALS]}

    def action_wish(self, wish: str) -> None:
        """Say what it costs to have something tried beside the verdict, and ask."""
        backend, folder = self.diagnose.backend, self._launched.folder
        self.ask("cost", lambda: backend.cost(folder, wish), lambda cost: self._wish_costed(wish, cost))

    def _wish_costed(self, wish: str, cost: Cost) -> None:
        what, section = WISHES[wish]
        if not cost.what:
            self.notify(f"There is nothing to do for: {what.lower()}", severity="warning", markup=False)
        elif not cost.runs:
            self.notify(f"That was done: see “{section}” in the verdict.", markup=False)
        else:
            took = "" if cost.seconds is None else f", about {seconds(cost.seconds)}"
            details = (
                *(f"• {line}" for line in cost.what),
                f"Cost: {cost.runs} runs, {cost.steps:,} steps in all{took}.",
                *(
                    ("They ease the effect; mending the cause, as “What to do” says, needs no trial.",)
                    if wish == "try_fix"
                    else ()
                ),
                f"The verdict stays; what comes out is added to it, under “{section}”.",
            )
            self.app.push_screen(ConfirmScreen(what, details), lambda yes: self._wish(wish) if yes else None)

    def _wish(self, wish: str) -> None:
        """Start a runner for what is wanted; what it finds is in the verdict then."""
        self.ask("stop", lambda: self.diagnose.backend.wish(self._launched.folder, wish), self._resumed)

    def action_more_time(self) -> None:
        """Ask how much more time the replays may have."""
        hint = f"{self._snapshot.view.left_out} replays were left out; what is done is kept"
        check = partial(number_between, low=0.0, high=1e7)
        self.app.push_screen(
            AskScreen("Go on for so many more seconds", MORE_S, hint, check), self._more_time
        )

    def _more_time(self, value: str | None) -> None:
        if value is not None:
            backend, folder = self.diagnose.backend, self._launched.folder
            self.ask("stop", lambda: backend.add_time(folder, float(value)), self._resumed)

    def action_retry(self) -> None:
        """Do a failed replay again."""
        row = self._row()
        assert row is not None
        run = row.run
        self.ask("stop", lambda: self.diagnose.backend.retry(self._launched.folder, run), self._resumed)

    def action_stop(self) -> None:
        """Stop the run, after a yes."""
        view = self._snapshot.view
        details = (f"{view.count_line()} are done and will be kept; u resumes the rest.",)
        self.app.push_screen(ConfirmScreen("Stop the run?", details), self._stop_answered)

    def _stop_answered(self, yes: bool | None) -> None:
        if yes:
            self.notify("Stopping …", markup=False)
            self.ask("stop", lambda: self.diagnose.backend.stop(self._launched.folder), lambda _: None)

    def action_resume(self) -> None:
        """Start a runner again."""
        self.ask("stop", lambda: self.diagnose.backend.resume(self._launched.folder), self._resumed)

    def _resumed(self, launched: Launched) -> None:
        self._launched = launched
        self._verdict_seen = False
        self._follow()

    def action_leave(self) -> None:
        """Back to the first screen; a run that is under way goes on."""
        if self._snapshot.alive:
            self.notify("The run goes on; it is under past runs.", markup=False)
        while len(self.app.screen_stack) > 2:
            self.app.pop_screen()
