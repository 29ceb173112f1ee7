"""The torch-free face of the package: jobs go in, events come out, worker processes do the work.

A worker is `python -m proxy.worker`: one job at a time, one thread, JSON lines on both sides. The pool
spawns a worker when there is a job for it, and keeps it for the next one (importing torch costs seconds). A
worker that dies (killed, out of memory) fails its own job with the reason and the last lines it wrote; the
others go on.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND_VARIABLE = "DIAGNOSE_WORKER"
"""Environment variable that replaces the worker command, split as a shell does (tests, odd set-ups)."""

ONE_THREAD = {
    name: "1"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
}
"""One thread a worker, as many workers as cores: two processes beat two threads by far on a busy machine."""

STOP_PATIENCE_S = 3.0
LAST_LINES = 3


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        id: Name that its events carry.
        job: "build", "run", "hash" and whatever else the worker knows.
        spec: JSON-able arguments, e.g. ``asdict`` of a `RunSpec`.
        out: Folder that it writes to ("" where it writes none).
    """

    id: str
    job: str
    spec: Mapping[str, Any]
    out: str = ""

    def to_line(self) -> str:
        """Return the line that a worker reads."""
        return json.dumps({"id": self.id, "job": self.job, "spec": self.spec, "out": self.out}) + "\n"


@dataclass(frozen=True)
class WorkerEvent:
    """Base of what a worker says about a job."""

    id: str


@dataclass(frozen=True)
class Started(WorkerEvent):
    """A worker took the job up."""


@dataclass(frozen=True)
class Step(WorkerEvent):
    """A training step is done; non-finite values are None."""

    step: int
    steps: int
    data: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Note(WorkerEvent):
    """A sentence for humans."""

    text: str


@dataclass(frozen=True)
class Done(WorkerEvent):
    """The job is over; what it returns depends on the job."""

    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed(WorkerEvent):
    """The job is over without a result; `died` tells a dead worker from a job that said no."""

    reason: str
    died: bool = False


def parse_event(line: str) -> WorkerEvent | None:
    """Return the event of a worker's line, None where it isn't one (a library that prints)."""
    try:
        raw = json.loads(line)
        kind, job = raw["event"], str(raw["id"])
        if kind == "started":
            return Started(job)
        if kind == "step":
            return Step(job, int(raw["step"]), int(raw["steps"]), dict(raw.get("data") or {}))
        if kind == "note":
            return Note(job, str(raw["text"]))
        if kind == "done":
            return Done(job, dict(raw.get("result") or {}))
        if kind == "failed":
            return Failed(job, str(raw["reason"]))
    except (ValueError, KeyError, TypeError):
        pass
    return None


def worker_command() -> list[str]:
    """Return the command that starts a worker; -P, so that no `proxy` folder of the user's comes first."""
    override = os.environ.get(COMMAND_VARIABLE)
    return shlex.split(override) if override else [sys.executable, "-P", "-m", "proxy.worker"]


def _die_with_parent() -> Callable[[], None] | None:
    """Return what the child calls before it becomes the worker, so that it can't outlive its parent.

    Linux only (PR_SET_PDEATHSIG); elsewhere a worker notices by the end of its stdin and by a failing write.
    The kernel watches the *thread* that made the child, so workers are spawned from the pool's own thread.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def in_child() -> None:
        libc.prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return in_child


class _Worker:
    """One worker process and the thread that reads it; `inbox` receives (worker, line or None at the end)."""

    def __init__(
        self, command: Sequence[str], log: Path, inbox: queue.Queue[tuple[_Worker, str | None]]
    ) -> None:
        self.log = log
        self.job: Job | None = None
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
                process_group=0,  # Ctrl-C goes to the parent alone, which ends its workers in order
                preexec_fn=_die_with_parent(),
            )
        threading.Thread(target=self._read, args=(inbox,), daemon=True).start()

    def _read(self, inbox: queue.Queue[tuple[_Worker, str | None]]) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        with suppress(ValueError, OSError):  # closed under our hands by `close`
            for line in stdout:
                inbox.put((self, line.decode("utf-8", "replace")))
        inbox.put((self, None))

    def send(self, job: Job) -> None:
        """Hand over a job. A process that has gone meanwhile shows by the end of its output, not here."""
        stdin = self.process.stdin
        assert self.job is None and stdin is not None
        self._log_start = self.log.stat().st_size
        self.job = job
        with suppress(BrokenPipeError):
            stdin.write(job.to_line().encode())
            stdin.flush()

    def obituary(self) -> str:
        """Wait for the end; say in one line how it came, with what stderr said last in this job."""
        self.reap()
        code = self.process.returncode
        how = f"ended with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (often: out of memory)"
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
        words = " | ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip())
        return f"the worker {how}" + (f": {words}" if words else "")

    def close(self) -> None:
        """Ask the process to end, and everything it started."""
        self._kill(signal.SIGTERM)

    def reap(self) -> None:
        """Wait for the end, by force when it takes too long."""
        try:
            self.process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill(signal.SIGKILL)
            self.process.wait()
        self._kill(signal.SIGKILL)  # what the worker itself had started
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _kill(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class WorkerPool:
    """Up to `workers` processes that work on submitted jobs; a context manager that leaves none behind.

    Use it from one thread. Jobs start in the order of their submission.
    """

    def __init__(self, workers: int, log_dir: Path, command: Sequence[str] | None = None) -> None:
        assert workers >= 1
        self._size = workers
        self._log_dir = log_dir
        self._command = list(command or worker_command())
        self._slots: list[_Worker | None] = [None] * workers
        self._waiting: deque[Job] = deque()
        self._inbox: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
        self._unborn: list[Failed] = []

    def __enter__(self) -> WorkerPool:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outstanding(self) -> int:
        """Jobs submitted whose last event was not handed out yet."""
        return (
            len(self._waiting) + len(self._unborn) + sum(1 for worker in self._slots if worker and worker.job)
        )

    @property
    def free(self) -> int:
        """Jobs that could be submitted and would start at once."""
        return max(0, self._size - self.outstanding)

    def submit(self, job: Job) -> None:
        """Queue a job; it starts as soon as a worker is free."""
        self._waiting.append(job)
        self._dispatch()

    def poll(self, timeout_s: float = 0.2) -> list[WorkerEvent]:
        """Return what happened, waiting up to `timeout_s` for the first event."""
        events: list[WorkerEvent] = list(self._unborn)
        self._unborn.clear()
        try:
            message = self._inbox.get(block=not events, timeout=timeout_s)
            while True:
                events += self._handle(*message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._dispatch()
        return events

    def events(self) -> Iterator[WorkerEvent]:
        """Yield events until every submitted job is over (`Done` or `Failed` is a job's last)."""
        while self.outstanding:
            yield from self.poll()

    def close(self) -> None:
        """End all workers, by force where needed."""
        self._waiting.clear()
        workers = [worker for worker in self._slots if worker]
        self._slots = [None] * self._size
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.reap()

    def _dispatch(self) -> None:
        """Give waiting jobs to free workers, spawning them where there are fewer than allowed."""
        for slot in range(self._size):
            if not self._waiting:
                return
            worker = self._slots[slot]
            if worker and worker.job:
                continue
            job = self._waiting.popleft()
            if worker is None or worker.process.poll() is not None:  # none yet, or it died in its sleep
                try:
                    worker = _Worker(self._command, self._log_dir / f"worker_{slot}.log", self._inbox)
                except OSError as error:
                    self._unborn.append(Failed(job.id, f"no worker could be started: {error}", died=True))
                    continue
                self._slots[slot] = worker
            worker.send(job)

    def _handle(self, worker: _Worker, line: str | None) -> list[WorkerEvent]:
        """Turn one message into events, noting which worker is free again."""
        if line is None:
            return self._buried(worker)
        event = parse_event(line)
        if event is None:
            with worker.log.open("a", encoding="utf-8") as log:
                log.write(f"[stdout] {line.rstrip()}\n")
            return []
        if worker.job is None or event.id != worker.job.id:
            return []  # a late word about a job that is over
        if isinstance(event, Done | Failed):
            worker.job = None
        return [event]

    def _buried(self, worker: _Worker) -> list[WorkerEvent]:
        """Take a dead worker out of its slot and fail its job."""
        if worker in self._slots:
            self._slots[self._slots.index(worker)] = None
        job, worker.job = worker.job, None
        reason = worker.obituary()
        return [Failed(job.id, reason, died=True)] if job else []
