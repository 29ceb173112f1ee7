"""Watching a run: a viewer tails the event file and touches nothing, so killing it changes nothing.

On a terminal it shows live bars, otherwise (a pipe, `CI=true`) one plain line for each thing that happened.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diagnose.console import Terminal
from diagnose.events import (
    EndEvent,
    Event,
    NoteEvent,
    RunEvent,
    SessionEvent,
    StageEvent,
    StepEvent,
    Tail,
    VerdictEvent,
)
from diagnose.report.text import literal, number
from diagnose.store import RunFolder
from taxonomy.metrics import METRIC_BY_NAME

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

POLL_S = 0.1
QUIET_S = 60.0
"""Seconds after which a replay under way is told of in plain lines: on a cluster one takes hours."""
LIVE_METRICS = ("critic/rewards/mean", "actor/kl_loss")
"""What a live bar shows beside a run's steps."""


@dataclass
class Counts:
    """How far a session is: its replays by status."""

    status: dict[str, str] = field(default_factory=dict)

    def take(self, event: RunEvent) -> None:
        """Note a replay's new status."""
        self.status[event.run] = event.status

    @property
    def over(self) -> int:
        """Replays that are done or failed."""
        return sum(1 for status in self.status.values() if status in ("done", "failed"))

    @property
    def all(self) -> int:
        """Replays that are planned."""
        return len(self.status)


@dataclass
class Watched:
    """What a viewer has to tell at the end.

    Attributes:
        end: The runner's last word, None where it died without one.
        problem: Why the session failed and the mend, None where it didn't.
    """

    end: EndEvent | None = None
    problem: tuple[str, str] | None = None


def follow(
    folder: RunFolder,
    terminal: Terminal,
    process: subprocess.Popen[bytes] | None = None,
    offset: int = 0,
) -> Watched:
    """Show what the runner of a folder does until it ends.

    Args:
        folder: The run folder.
        terminal: Where to show it.
        process: The runner where this process started it; it is waited for, so that no zombie stays.
        offset: Where to start in the event file; what is before it is older than this runner.
    """
    tail = Tail(folder.events, offset)
    watched = Watched()
    with ExitStack() as stack:
        show = stack.enter_context(_LiveView(terminal)) if terminal.live else _PlainView(terminal)
        while True:
            # Asked before the events are read: what was written before the end is then read for certain.
            alive = process.poll() is None if process else folder.is_alive()
            for event in tail.poll():
                watched.end = event if isinstance(event, EndEvent) else None
                if isinstance(event, SessionEvent):
                    watched.problem = None  # that of an earlier runner
                if isinstance(event, NoteEvent) and event.level == "error":
                    watched.problem = (event.text, event.mend)
                else:
                    show(event)
            if not alive:
                return watched
            time.sleep(POLL_S)


class _PlainView:
    """One line an event; of the steps one every `QUIET_S` seconds a run, or every twentieth when asked for details."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._counts = Counts()
        self._said_t: dict[str, float] = {}  # of each replay, when something was last said of it

    def __call__(self, event: Event) -> None:
        line = self.line(event)
        if line:
            self._terminal.say(line)

    def line(self, event: Event) -> str:
        """Return the line of an event, "" for one that is not shown."""
        if isinstance(event, RunEvent):
            self._counts.take(event)
            self._said_t[event.run] = event.t
            if event.status == "queued":
                return ""
            reason = f": {event.reason}" if event.reason else ""
            return f"run {event.run}: {event.status} ({self._counts.over}/{self._counts.all}){reason}"
        if isinstance(event, StepEvent):
            detail = self._terminal.verbosity >= 1 and event.step % 20 == 0
            if not detail and event.t - self._said_t.setdefault(event.run, event.t) < QUIET_S:
                return ""
            self._said_t[event.run] = event.t
            return f"run {event.run}: step {event.step}/{event.steps} {_metrics(event)}"
        return describe(event)


def describe(event: Event) -> str:
    """Return an event that is no replay's as one line, "" for one that goes without saying."""
    match event:
        case SessionEvent():
            candidates = f"{len(event.candidates)} candidate{'s' if len(event.candidates) != 1 else ''}"
            seeds = f"{len(event.seeds)} seed{'s' if len(event.seeds) != 1 else ''}"
            return f"{event.name}: {event.symptom}, {candidates}, {seeds}, {event.steps} steps"
        case StageEvent(stage="score" | "report", status="started" | "done"):
            return ""  # a moment's work, and the answer itself follows
        case StageEvent(status="started"):
            return f"{event.stage} …" + (f" {event.detail}" if event.detail else "")
        case StageEvent():
            return f"{event.stage}: {event.status}" + (f" ({event.detail})" if event.detail else "")
        case NoteEvent():
            return f"warning: {event.text}" if event.level == "warn" else event.text
        case VerdictEvent():
            return f"verdict: {event.verdict}"
        case EndEvent() if event.status != "completed":
            return event.status
    return ""


def _metrics(event: StepEvent) -> str:
    return "  ".join(
        f"{METRIC_BY_NAME[name].title} {number(event.data[name])}"
        for name in LIVE_METRICS
        if name in event.data
    )


class _LiveView:
    """Bars: one for the whole, one for each replay at work; everything else scrolls by above them."""

    def __init__(self, terminal: Terminal) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False, style="dim"),
            TimeElapsedColumn(),
            console=terminal.stderr(),
            transient=True,
            refresh_per_second=8,
        )
        self._counts = Counts()
        self._total: TaskID | None = None
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Callable[[Event], None]:
        self._progress.start()
        return self._take

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _take(self, event: Event) -> None:
        if isinstance(event, RunEvent):
            self._run(event)
        elif isinstance(event, StepEvent):
            if (bar := self._bars.get(event.run)) is not None:
                self._progress.update(
                    bar, completed=event.step, total=event.steps, note=literal(_metrics(event), 60)
                )
        elif line := describe(event):
            self._progress.console.print(literal(line))

    def _run(self, event: RunEvent) -> None:
        """Start or end a replay's bar and move the bar of the whole."""
        self._counts.take(event)
        name = literal(event.run, 60)
        if self._total is None:
            self._total = self._progress.add_task("replays", note="")
        self._progress.update(self._total, completed=self._counts.over, total=self._counts.all)
        if event.status == "started":
            self._bars[event.run] = self._progress.add_task(f"  {name}", total=None, note="")
        elif event.run in self._bars:
            self._progress.remove_task(self._bars.pop(event.run))
        if event.status == "failed":
            self._progress.console.print(literal(f"run {event.run} failed: {event.reason}"))
