"""What the TUI asks of the rest of the program: playbooks, past runs, starting, resuming and stopping."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diagnose.store import RunFolder


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
        state: "running", "finished: <verdict>", "failed" or "resumable".
    """

    path: Path
    name: str
    state: str


@dataclass(frozen=True)
class Choice:
    """One candidate fault as the candidates screen shows it.

    Attributes:
        fault: Fault id.
        title: Card title.
        category: Category id.
        why: Why it is a candidate, or the mechanism.
        metric: Canonical metric that tells it from its look-alikes.
        strength: Multiple of the card's default.
        selected: Whether the playbook would replay it.
        refused: Why it cannot be replayed, "" when it can.
    """

    fault: str
    title: str
    category: str
    why: str
    metric: str
    strength: float = 1.0
    selected: bool = True
    refused: str = ""


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
    """

    path: Path
    name: str
    symptom: str
    choices: tuple[Choice, ...]
    seeds: int
    steps: int
    facts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


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

    def plan(self, path: Path, symptom: str | None = None) -> Plan:
        """Read a playbook; `symptom` overrides the playbook's."""

    def start(self, plan: Plan, faults: tuple[str, ...], seeds: int) -> Launched:
        """Make a run folder and start its runner. `plan.commands` have been allowed."""

    def resume(self, folder: RunFolder) -> Launched:
        """Start a runner in a folder that has none."""

    def stop(self, folder: RunFolder) -> bool:
        """End the runner; return whether there was one."""
