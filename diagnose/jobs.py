"""Worker jobs in the foreground, for commands that need no run folder: start, narrate, return results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from diagnose.console import Terminal
from diagnose.errors import RunError
from diagnose.store import read_json, write_json
from proxy.api import Done, Failed, Job, Note, Step, WorkerPool
from proxy.specs import RunOutcome, RunSpec

if TYPE_CHECKING:
    from diagnose.curves import Curves


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Iterable[Job], workers: int | None, terminal: Terminal) -> dict[str, Mapping[str, Any]]:
    """Carry out jobs, as many at a time as there are workers; return their results by job id.

    Raises:
        RunError: A job failed; the others are stopped.
    """
    queue = list(jobs)
    results: dict[str, Mapping[str, Any]] = {}
    if not queue:
        return results
    with (
        TemporaryDirectory(prefix="diagnose-") as logs,
        WorkerPool(min(workers or cores(), len(queue)), Path(logs)) as pool,
    ):
        for job in queue:
            pool.submit(job)
        for event in pool.events():
            match event:
                case Note():
                    terminal.say(event.text)
                case Step() if event.step == 1 or event.step % max(event.steps // 4, 1) == 0:
                    # One run alone would otherwise be silent for minutes.
                    terminal.say(f"{event.id}: step {event.step}/{event.steps}", level=int(len(queue) > 1))
                case Done():
                    results[event.id] = event.result
                    if len(queue) > 1:
                        terminal.say(f"{event.id}: done ({len(results)}/{len(queue)})")
                case Failed():
                    raise RunError(f"{event.id}: {event.reason}" if len(queue) > 1 else event.reason)
    return results


def run_job(kind: str, spec: Mapping[str, Any], terminal: Terminal) -> Mapping[str, Any]:
    """Carry out one job and return its result. Raises RunError where it fails."""
    return run_jobs([Job(kind, kind, spec)], 1, terminal)[kind]


def model_hash(checkpoint: str, terminal: Terminal) -> str:
    """Return the content hash of a checkpoint, computed by a worker."""
    return str(run_job("hash", {"model": checkpoint}, terminal)["hash"])


def run_all(
    specs: Mapping[str, RunSpec], home: Path, workers: int | None, terminal: Terminal
) -> dict[str, Curves]:
    """Carry out runs, each in its folder under `home`, and return their curves; finished ones are not redone.

    Which interpreter of verl's environment ran one, and what it was allowed to take, makes no other run of it.

    Raises:
        RunError: A run failed.
    """
    from diagnose.logs import read

    missing = []
    for name, spec in specs.items():
        folder = home / name
        stored = read_json(folder / "spec.json")
        if stored is not None and RunSpec.from_json(stored).key("") == spec.key("") and read_outcome(folder):
            continue
        make_ready(folder, asdict(spec))
        missing.append(Job(name, "run", asdict(spec), str(folder)))
    run_jobs(missing, workers, terminal)
    for name in specs:
        outcome = read_outcome(home / name)
        if outcome is None or outcome.status != "completed":
            raise RunError(f"{name}: {outcome.reason if outcome else 'no outcome was written'}")
    return {name: read(home / name / "metrics.jsonl").runs[-1].curves for name in specs}


def make_ready(folder: Path, spec: Mapping[str, Any]) -> None:
    """Prepare the folder of a run that is about to start: nothing of an earlier try stays, its spec is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in ("outcome.json", "metrics.jsonl"):
        (folder / stale).unlink(missing_ok=True)
    write_json(folder / "spec.json", spec)


def read_outcome(folder: Path) -> RunOutcome | None:
    """Return how the run in a folder ended, None where it has not (or not readably)."""
    raw = read_json(folder / "outcome.json")
    try:
        return RunOutcome(**raw) if isinstance(raw, dict) else None
    except TypeError:
        return None
