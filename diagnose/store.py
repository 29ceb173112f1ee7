"""The run folder: where a session keeps everything it was given, did and found.

    RUN_DIR/ session.json · playbook.yaml · inputs/*.jsonl · events.jsonl · runner.pid, runner.lock,
             runner.log, worker_*.log · proxy/ · runs/<run id>/{spec.json, metrics.jsonl, outcome.json} ·
             race.json · more_time.json · wishes.json · extra/<run id>/… · result.json

Whether a runner is alive is asked of the lock, not of the pid: a lock ends with its process, a pid is reused.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diagnose.errors import RunError

LOCK_PATIENCE_S = 1.0
"""How long a runner waits for the lock: a viewer that asks `is_alive` holds it for an instant."""


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; `value` holds no non-finite number (ValueError otherwise)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any | None:
    """Return a JSON file's value, None where there is no such file or not (yet) valid JSON in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def default_parent() -> Path:
    """Return the folder in which run folders are made when the user names none."""
    from platformdirs import user_state_path

    return user_state_path("rl-diagnose") / "diagnose_runs"


@dataclass(frozen=True)
class RunFolder:
    """Paths and state of one run folder."""

    path: Path

    @property
    def session(self) -> Path:
        """The validated playbook and everything that was resolved from it."""
        return self.path / "session.json"

    @property
    def playbook(self) -> Path:
        """Copy of the playbook."""
        return self.path / "playbook.yaml"

    @property
    def inputs(self) -> Path:
        """The original's curves as imported."""
        return self.path / "inputs"

    @property
    def events(self) -> Path:
        """The append-only event file."""
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """What the runner printed, tracebacks included."""
        return self.path / "runner.log"

    @property
    def proxy(self) -> Path:
        """The built checkpoint."""
        return self.path / "proxy"

    @property
    def runs(self) -> Path:
        """One folder a replay."""
        return self.path / "runs"

    @property
    def extra(self) -> Path:
        """One folder a run of a probe or a remedy; none of them is a replay."""
        return self.path / "extra"

    @property
    def pause(self) -> Path:
        """There while no further replay is to start: made and removed by viewers, heeded by the runner."""
        return self.path / "pause"

    @property
    def wishes(self) -> Path:
        """What the user wants beside the verdict: probes, remedies."""
        return self.path / "wishes.json"

    @property
    def more_time(self) -> Path:
        """Seconds that the user has added to the session's budget since."""
        return self.path / "more_time.json"

    def add_time(self, seconds: float) -> None:
        """Let the replays take `seconds` more than the session's budget and what was added before. Raises OSError."""
        write_json(self.more_time, {"seconds": self.added_s() + seconds})

    def added_s(self) -> float:
        """Return the seconds that were added to the session's budget, 0.0 where none were."""
        kept = read_json(self.more_time)
        seconds = kept.get("seconds") if isinstance(kept, dict) else None
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    @property
    def race(self) -> Path:
        """How far the race has come: which replays it has called for, and who stopped."""
        return self.path / "race.json"

    @property
    def result(self) -> Path:
        """The answer."""
        return self.path / "result.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder as its one runner, pid file included; raises RunError when another one does."""
        with (self.path / "runner.lock").open("a") as lock:
            deadline = time.monotonic() + LOCK_PATIENCE_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RunError(
                            f"a runner is already at work in {self.path}",
                            f"watch it with: diagnose run --resume {self.path}",
                        ) from None
                    time.sleep(0.02)
            write_text(self.path / "runner.pid", f"{os.getpid()}\n")
            yield

    def is_alive(self) -> bool:
        """Whether a runner is at work in this folder."""
        try:
            lock = (self.path / "runner.lock").open()
        except FileNotFoundError:
            return False
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def stop(self, patience_s: float = 30.0) -> bool:
        """End the runner: SIGTERM, after `patience_s` SIGKILL. Returns whether one was at work."""
        if not self.is_alive():
            return False
        deadline = time.monotonic() + patience_s
        while (pid := self._runner()) is None and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)  # it has the lock, and is about to say who it is
        if pid is None:
            return False
        self._signal(pid, signal.SIGTERM)
        while self.is_alive():
            if time.monotonic() > deadline:
                self._signal(pid, signal.SIGKILL)
                deadline += patience_s
            time.sleep(0.05)
        return True

    def _runner(self) -> int | None:
        """Return the process id that the runner wrote down, None where there is none yet."""
        with suppress(OSError, ValueError):
            return int((self.path / "runner.pid").read_text())
        return None

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        """Send a signal to a process that may have ended by itself meanwhile."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def create(name: str, out: Path | None = None) -> RunFolder:
    """Make a run folder: `out`, or a new one named after the playbook and the time under `default_parent`.

    Raises:
        RunError: `out` exists and holds something.
    """
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            mend = "name another one with --out"
            if (out / "session.json").is_file():
                mend += f", or go on with: diagnose run --resume {out}"
            raise RunError(f"{out} exists and is not an empty folder", mend)
        path = out
        path.mkdir(parents=True, exist_ok=True)
    else:
        stem = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)[:60]}-{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}"
        path = _new_folder(default_parent(), stem)
    for part in ("inputs", "runs"):
        (path / part).mkdir()
    return RunFolder(path.resolve())


def _new_folder(parent: Path, stem: str) -> Path:
    """Make a folder that did not exist, numbered where two sessions start in the same second."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise RunError(f"no free folder name like {parent / stem}", "name one with --out")


def open_folder(path: Path) -> RunFolder:
    """Return an existing run folder.

    Raises:
        RunError: There is no session in `path`, or it cannot be read.
    """
    folder = RunFolder(path.resolve())
    if not folder.session.exists():
        raise RunError(f"{path} is not a run folder (no session.json in it)", "name the folder of a run")
    if read_json(folder.session) is None:
        raise RunError(f"{folder.session} is broken: not JSON", "start the run anew")
    return folder


def list_runs(parent: Path | None = None) -> list[RunFolder]:
    """Return the run folders under `parent` (the default one), newest first."""
    parent = parent or default_parent()
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if (path / "session.json").is_file()]
    return [
        RunFolder(path)
        for path in sorted(found, key=lambda path: (path / "session.json").stat().st_mtime, reverse=True)
    ]
