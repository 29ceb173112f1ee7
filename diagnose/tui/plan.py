"""What the screens and the program behind them hand each other."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from diagnose.store import RunFolder

if TYPE_CHECKING:
    from diagnose.report.evidence import Evidence


@dataclass(frozen=True)
class PlaybookEntry:
    """One playbook to choose from.

    Attributes:
        name: Its name.
        path: Its file.
        symptom: Its symptom id, "" where it can't be read.
    """

    name: str
    path: Path
    symptom: str = ""


@dataclass(frozen=True)
class PastRun:
    """One run folder.

    Attributes:
        path: The folder.
        name: Playbook name.
        state: How it stands, in a few words.
    """

    path: Path
    name: str
    state: str


@dataclass(frozen=True)
class Incident:
    """A log that an engineer opened without a playbook, and what else there is.

    Attributes:
        faulty: The incident's log.
        healthy: Log of a healthy twin, None where there is none.
        checkpoint: Folder of the model or ``embedded:NAME``, "" for none: the embedded model stands in.
    """

    faulty: Path
    healthy: Path | None = None
    checkpoint: str = ""


@dataclass(frozen=True)
class Seen:
    """One symptom as the logs show it.

    Attributes:
        evidence: What shows it, in a few words.
        onset: Interval of steps in which it began, None where that is unknown.
        metric: Canonical metric that shows it, "" for the one that the symptom is named after.
    """

    evidence: str
    onset: tuple[int, int] | None = None
    metric: str = ""


@dataclass(frozen=True)
class Choice:
    """One candidate fault as the candidates screen shows it.

    Attributes:
        fault: Fault id.
        title: Card title.
        category: Category id.
        why: Why it is a candidate: what the log says for it, "" where that is nothing.
        metric: Canonical metric that tells it from its look-alikes.
        strength: Multiple of the card's default.
        selected: Whether the playbook would replay it.
        refused: Why it cannot be replayed, "" when it can.
        mechanism: What the fault is.
        ruled_out: Why the log or its setting rules it out, "" where neither does.
    """

    fault: str
    title: str
    category: str
    why: str
    metric: str
    strength: float = 1.0
    selected: bool = True
    refused: str = ""
    mechanism: str = ""
    ruled_out: str = ""


@dataclass(frozen=True)
class Plan:
    """A playbook that was read, ready for the engineer's choices.

    Attributes:
        path: The playbook.
        name: Its name.
        symptom: Symptom in force: the playbook's, or the one that the engineer picked instead.
        choices: Candidates for that symptom.
        seeds: Seeds a candidate.
        steps: Steps a run.
        facts: Short sentences about original, proxy and engine.
        commands: Commands that the playbook would run, which have to be allowed first.
        seen: Symptoms that the logs show, by id.
        ruled_out: Causes that the logs or the context rule out: (title, why).
        advice: What to do now, whatever the cause.
        look: The check that costs least. It is a guess at the cause.
        budget_s: Seconds that the replays may take, 0 for no limit.
        race: Whether candidates race: each one replay, then more of those that come nearest.
        workers: Replays at a time.
        step_s: Seconds that a step of a replay takes, None where nothing like it was ever run.
        evidence: The incident's curves and those of its healthy twins, None where they were not read.
    """

    path: Path
    name: str
    symptom: str
    choices: tuple[Choice, ...]
    seeds: int
    steps: int
    facts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    seen: Mapping[str, Seen] = field(default_factory=dict)
    ruled_out: tuple[tuple[str, str], ...] = ()
    advice: tuple[str, ...] = ()
    look: str = ""
    budget_s: float = 0.0
    race: bool = False
    workers: int = 1
    step_s: float | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Order:
    """What the engineer wants run.

    Attributes:
        faults: Faults to replay.
        seeds: Seeds of every replay.
        strengths: Strength by fault where it is not the plan's, in multiples of the card's default.
        budget_s: Seconds that the replays may take, 0 for no limit.
    """

    faults: tuple[str, ...]
    seeds: int
    strengths: Mapping[str, float] = field(default_factory=dict)
    budget_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What something beside the verdict would take.

    Attributes:
        what: What would be tried, in words.
        runs: Runs that are not there yet.
        steps: Their steps, all together.
        seconds: How long they would take at the pace of the replays so far, None where that is unknown.
    """

    what: tuple[str, ...]
    runs: int
    steps: int
    seconds: float | None = None


@dataclass(frozen=True)
class Launched:
    """A run folder with its runner, where this process started it."""

    folder: RunFolder
    process: subprocess.Popen[bytes] | None = None


class Backend(Protocol):
    """The program behind the screens. Every method may block and raises `DiagnoseError` for users."""

    def playbooks(self) -> tuple[PlaybookEntry, ...]:
        """Return the shipped playbooks and those of the working folder."""

    def past_runs(self) -> tuple[PastRun, ...]:
        """Return past runs, newest first."""

    def recent_logs(self) -> tuple[Path, ...]:
        """Return the logs that were opened lately and are still there, newest first."""

    def keep_pasted(self, text: str) -> Path:
        """Write a pasted piece of a log into a file of its own and return that."""

    def playbook_for(self, incident: Incident) -> Path:
        """Write the playbook of a log that has none, and return its file."""

    def plan(self, path: Path, symptom: str | None = None) -> Plan:
        """Read a playbook; `symptom` overrides the playbook's."""

    def start(self, plan: Plan, order: Order) -> Launched:
        """Make a run folder and start its runner. `plan.commands` have been allowed."""

    def resume(self, folder: RunFolder) -> Launched:
        """Start a runner in a folder that has none."""

    def pause(self, folder: RunFolder) -> bool:
        """Let no further replay start, or let them start again; return whether it is paused now."""

    def cost(self, folder: RunFolder, wish: str) -> Cost:
        """Return what a wish would take: "probe" or "try_fix"."""

    def add_time(self, folder: RunFolder, seconds: float) -> Launched:
        """Start a runner that has `seconds` more for the replays than the budget that was spent."""

    def wish(self, folder: RunFolder, wish: str) -> Launched:
        """Start a runner that does something beside the verdict: "probe" or "try_fix"."""

    def retry(self, folder: RunFolder, run: str) -> Launched:
        """Forget a failed replay and start a runner, which does it again."""

    def stop(self, folder: RunFolder) -> bool:
        """End the runner; return whether there was one."""
