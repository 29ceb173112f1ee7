"""What the run screen shows: events folded into an immutable view, without a clock and without Textual.

Times come from the events alone, so the same event file always gives the same view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from diagnose.events import (
    STAGES,
    EndEvent,
    Event,
    NoteEvent,
    RunEvent,
    SessionEvent,
    StageEvent,
    StepEvent,
    VerdictEvent,
)
from diagnose.report.evidence import Evidence
from diagnose.report.text import literal, seconds
from diagnose.report.words import replay_of_run
from diagnose.result import Result

MAX_NOTES = 200
EXTRAS = ("probe", "fix")
"""First words of the ids of runs that are no replays: they belong to what is asked for beside the verdict."""
_STAGE_SIGN = {"waiting": "·", "started": "▶", "done": "✔", "skipped": "✔", "failed": "✘"}
_RUN_SIGN = {"queued": "·", "started": "▶", "done": "✔", "failed": "✘", "left out": "–"}


@dataclass(frozen=True)
class RunRow:
    """One replay.

    Attributes:
        run: Run id.
        fault: Fault id, None for a healthy replay.
        seed: Seed.
        status: queued, started, done, failed, or left out (the budget was spent).
        step: Last finished step.
        steps: Steps in all, 0 while unknown.
        started_t: Unix time of its start, 0 before.
        last_t: Unix time of its last event.
        reason: Why it failed.
        witness: Numbers that prove the injection, known when it is done.
    """

    run: str
    fault: str | None
    seed: int
    status: str = "queued"
    step: int = 0
    steps: int = 0
    started_t: float = 0.0
    last_t: float = 0.0
    reason: str = ""
    witness: Mapping[str, float] = field(default_factory=dict)

    @property
    def extra(self) -> str:
        """What it tries beside the verdict, such as "probe frozen" or "fix lower_lr"; "" for a replay."""
        kind, _, rest = self.run.partition(".")
        what, dot, _ = rest.partition(".")
        return f"{kind} {what}" if kind in EXTRAS and dot else ""

    @property
    def name(self) -> str:
        """What it replays: the fault, with its strength where that is not the default, or "healthy"."""
        if self.fault is None:
            return "healthy"
        run = self.run.split(".", 2)[-1] if self.extra else self.run
        return replay_of_run(run) or self.fault

    @property
    def eta_s(self) -> float | None:
        """Seconds until its last step at the pace so far, None while there is no pace."""
        if self.status != "started" or not self.step or self.last_t <= self.started_t:
            return None
        return (self.last_t - self.started_t) / self.step * (self.steps - self.step)

    @property
    def state(self) -> str:
        """The state in words, with a sign that does not lean on colour."""
        sign = _RUN_SIGN.get(self.status, "?")
        if self.status == "started":
            eta = "" if self.eta_s is None else f", {seconds(self.eta_s)} left"
            return f"{sign} step {self.step}/{self.steps or '?'}{eta}"
        if self.status == "failed":
            return f"{sign} failed: {literal(self.reason, 200)}" if self.reason else f"{sign} failed"
        return f"{sign} {literal(self.status, 20)}"


@dataclass(frozen=True)
class Note:
    """One sentence of the runner for humans, with what to do about it where there is something."""

    text: str
    level: str = "info"
    mend: str = ""


@dataclass(frozen=True)
class RunView:
    """A run folder as its event file tells it.

    Attributes:
        name: Playbook name.
        symptom: Symptom id.
        candidates: Fault ids.
        seeds: Seeds.
        steps: Steps of a replay.
        stages: (stage, status, detail) in the order of the pipeline; status "waiting" before its first event.
        rows: Replays in the order in which they were queued.
        notes: The last notes.
        now: What the runner last said about the stage at hand, "" when it has said nothing yet.
        verdict: Verdict, "" before it is known.
        summary: Its headline.
        end: "completed", "interrupted" or "failed" once the runner has said its last word, "" before.
        exit_code: The exit code that goes with it.
        began_t: Unix time at which the first runner began, 0 before.
        session_t: The same of the last one.
        last_t: Unix time of the last event.
        earlier_s: Seconds that runners before the last one worked.
    """

    name: str = ""
    symptom: str = ""
    candidates: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int = 0
    stages: tuple[tuple[str, str, str], ...] = tuple((stage, "waiting", "") for stage in STAGES)
    rows: tuple[RunRow, ...] = ()
    notes: tuple[Note, ...] = ()
    now: str = ""
    verdict: str = ""
    summary: str = ""
    end: str = ""
    exit_code: int = 0
    began_t: float = 0.0
    session_t: float = 0.0
    last_t: float = 0.0
    earlier_s: float = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds that runners have worked so far, by their events."""
        return self.earlier_s + self.last_t - self.session_t

    @property
    def replays(self) -> tuple[RunRow, ...]:
        """The runs that the verdict rests on."""
        return tuple(row for row in self.rows if not row.extra)

    @property
    def finished(self) -> int:
        """Replays that are done or failed."""
        return _ended(self.replays)

    @property
    def left_out(self) -> int:
        """Replays that the budget did not allow."""
        return sum(row.status == "left out" for row in self.replays)

    def count_line(self) -> str:
        """Return how many runs there are, replays apart from the rest; the same words wherever they are counted."""
        words = [f"{self.finished} of {len(self.replays)} replays"]
        for kind in EXTRAS:
            own = [row for row in self.rows if row.extra.startswith(kind)]
            if own:
                words.append(f"{_ended(own)} of {len(own)} {kind} runs")
        return ", ".join(words)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last replay ends at the pace of this runner so far, None while there is no pace."""
        ours = [row for row in self.rows if row.started_t]
        walked = sum(row.step for row in ours)
        left = sum(
            (row.steps or self.steps) - row.step for row in self.rows if row.status in ("queued", "started")
        )
        if not walked or not left:
            return None
        spent = max(row.last_t for row in ours) - min(row.started_t for row in ours)
        return spent / walked * left if spent > 0 else None

    def stage_line(self) -> str:
        """Return the pipeline on one line: what is done, what is under way."""
        words = []
        for stage, status, _ in self.stages:
            count = f" {self.finished}/{len(self.replays)}" if stage == "replay" and self.rows else ""
            words.append(f"{_STAGE_SIGN.get(status, '?')} {stage}{count}")
        return "  ".join(words)

    def status_line(self, alive: bool, budget_s: float = 0.0, race: bool = False) -> str:
        """Return in one sentence how things stand.

        Args:
            alive: Whether a runner is at work in the folder.
            budget_s: Seconds that the replays may take, 0 for no limit.
            race: Whether more replays may follow those that are queued.
        """
        if self.end == "completed" and self.left_out:
            return f"The budget was spent: {self.count_line()}. b gives it more time."
        if self.end == "completed":
            return f"Finished: {self.count_line()}, in {seconds(self.spent_s)}."
        if self.end == "interrupted":
            done = f"Stopped, with a verdict on {self.count_line()}" if self.verdict else "Stopped"
            return f"{done}. What is done is kept; u resumes the rest.{self._no_verdict()}"
        if self.end == "failed":
            return f"Failed. {self._last_problem()}".strip()
        if not alive:
            said = self._last_problem()
            why = f"The last that is known: {said}. " if said else ""
            return f"The runner is gone without a last word. {why}What is done is kept; u resumes the rest."
        for stage, status, detail in self.stages:
            if status == "started":
                extra = f": {literal(detail, 200)}" if detail else ""
                if stage == "replay" and self.eta_s is not None:
                    extra += f", {self._left(budget_s, race)}"
                return f"{stage.capitalize()} under way{extra}"
        if any(row.extra and row.status in ("queued", "started") for row in self.rows):
            left = f"; about {seconds(self.eta_s)} left" if self.eta_s is not None else ""
            return f"Beside the verdict: {self.count_line()}{left}"
        return "Under way"

    def _left(self, budget_s: float, race: bool) -> str:
        """Return what is spent and what is left, the time limit minded."""
        assert self.eta_s is not None
        spent, left = f"{seconds(self.spent_s)} spent", f"about {seconds(self.eta_s)} left"
        if race:
            left += ", then more of the nearest"
        return (
            f"{spent}, {left}; no replay starts after {seconds(budget_s)}" if budget_s else f"{spent}, {left}"
        )

    def _no_verdict(self) -> str:
        """Return why a stopped run has no verdict, with a blank before it; "" where it has one."""
        kinds = {row.fault is None for row in self.replays if row.status == "done"}
        if self.verdict or kinds == {True, False}:
            return ""
        missing = "healthy replay" if True not in kinds else "replay with a fault"
        return f" No verdict yet: no {missing} is done."

    def _last_problem(self) -> str:
        for note in reversed(self.notes):
            if note.level in ("error", "warn"):
                return literal(f"{note.text} {note.mend}".strip())
        for stage, status, detail in self.stages:
            if status == "failed":
                return literal(f"{stage}: {detail}")
        return ""


@dataclass(frozen=True)
class Snapshot:
    """All that the run screen shows at one moment; never changed after it was made.

    Attributes:
        view: What the events say.
        evidence: Curves as far as they are written.
        alive: Whether a runner is at work.
        result: The result, None before there is one.
        problem: What keeps the folder from being read, "" when nothing does.
        budget_s: Seconds that the replays may take, 0 for no limit.
        race: Whether more replays may follow those that are queued.
        outdated: Whether the result was made by another scoring than the present one.
    """

    view: RunView = field(default_factory=RunView)
    evidence: Evidence = field(default_factory=Evidence)
    alive: bool = False
    result: Result | None = None
    problem: str = ""
    budget_s: float = 0.0
    race: bool = False
    outdated: bool = False


def _ended(rows: Iterable[RunRow]) -> int:
    return sum(row.status in ("done", "failed") for row in rows)


def fold(view: RunView, events: Iterable[Event]) -> RunView:
    """Return the view after some more events."""
    for event in events:
        view = replace(_fold(view, event), last_t=event.t)
    return view


def _fold(view: RunView, event: Event) -> RunView:
    match event:
        case SessionEvent():
            # A resumed session starts its stages again and keeps its finished rows.
            rows = tuple(
                replace(row, started_t=0.0)
                if row.status == "done"
                else replace(row, status="queued", step=0, started_t=0.0, reason="")
                for row in view.rows
            )
            return replace(
                RunView(),
                name=event.name,
                symptom=event.symptom,
                candidates=event.candidates,
                seeds=event.seeds,
                steps=event.steps,
                rows=rows,
                notes=view.notes,
                began_t=view.began_t or event.t,
                session_t=event.t,
                earlier_s=view.spent_s,
            )
        case StageEvent():
            stages = tuple(
                (stage, event.status, event.detail) if stage == event.stage else (stage, status, detail)
                for stage, status, detail in view.stages
            )
            return replace(view, stages=stages, now="")
        case RunEvent():
            return replace(view, rows=_run(view.rows, event))
        case StepEvent():
            return replace(
                view,
                rows=tuple(
                    replace(row, status="started", step=event.step, steps=event.steps, last_t=event.t)
                    if row.run == event.run
                    else row
                    for row in view.rows
                ),
            )
        case NoteEvent():
            note = Note(event.text, event.level, getattr(event, "mend", ""))
            return replace(view, notes=(*view.notes, note)[-MAX_NOTES:], now=event.text)
        case VerdictEvent():
            return replace(view, verdict=event.verdict, summary=event.summary)
        case EndEvent():
            rest = "left out" if event.status == "completed" else "queued"
            rows = tuple(
                row if row.status in ("done", "failed") else replace(row, status=rest, step=0)
                for row in view.rows
            )
            return replace(view, end=event.status, exit_code=event.exit_code, rows=rows)
    return view


def _run(rows: tuple[RunRow, ...], event: RunEvent) -> tuple[RunRow, ...]:
    """Return the rows after one event about a replay."""
    old = next((row for row in rows if row.run == event.run), None)
    new = replace(
        old or RunRow(event.run, event.fault, event.seed),
        status=event.status,
        reason=event.reason,
        witness=dict(event.witness),
        last_t=event.t,
    )
    if event.status in ("queued", "started"):
        new = replace(new, step=0, started_t=event.t if event.status == "started" else 0.0)
    return tuple(new if row.run == event.run else row for row in rows) if old else (*rows, new)
