"""Read a run folder again and again, cheaply: the only part that touches a running session's files.

Used from a worker thread; what it returns is immutable, so that the screen needs no lock.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from shutil import disk_usage

from diagnose.curves import Curves
from diagnose.events import Tail
from diagnose.provenance import outdated
from diagnose.report.evidence import Evidence, curves_from_records, read_inputs
from diagnose.report.json import ResultFileError, from_json
from diagnose.report.words import replay_of_run
from diagnose.result import Result
from diagnose.store import RunFolder, read_json
from diagnose.tui.model import RunView, Snapshot, fold

LEAST_ROOM = 1 << 16
"""Bytes under which a disk counts as full: the next write of anything fails."""


class MetricsTail:
    """One `metrics.jsonl` that may still grow, or start again when its run is redone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._rest = b""
        self._records: dict[int, Mapping[str, object]] = {}
        self.curves: Curves | None = None

    def poll(self) -> bool:
        """Read what is new; return whether `curves` changed."""
        try:
            with self._path.open("rb") as file:
                stat = self._path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset, self._rest, self._records = stat.st_ino, 0, b"", {}
                file.seek(self._offset)
                chunk = file.read()
        except OSError:
            return False
        if not chunk:
            return False
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
                self._records[int(record["step"])] = dict(record["data"])
            except (ValueError, TypeError, KeyError):
                continue
        self.curves = curves_from_records(self._path.parent.name, self._records)
        return True


class Follower:
    """Turns a run folder into snapshots."""

    def __init__(self, folder: RunFolder, process: subprocess.Popen[bytes] | None = None) -> None:
        self._folder = folder
        self._process = process  # the runner where we started it: it is waited for, so that no zombie stays
        self._tail = Tail(folder.events)
        self._metrics: dict[str, MetricsTail] = {}
        self._inputs: tuple[tuple[Curves, ...], tuple[Curves, ...]] = ((), ())
        self._view = RunView()
        self._last: Snapshot | None = None
        self._result: Result | None = None
        self._result_stamp = 0
        session = read_json(folder.session)
        session = session if isinstance(session, dict) else {}
        self._race = session.get("race") is True
        budget = session.get("budget_s")
        self._budget_s = (
            float(budget) + folder.added_s() if isinstance(budget, int | float) and budget else 0.0
        )

    def poll(self) -> Snapshot | None:
        """Return a new snapshot, None when nothing has changed since the last one."""
        problem, events, alive = "", [], False
        try:
            # Asked before the events are read: what a runner wrote before its end is then read for certain.
            alive = self._process.poll() is None if self._process else self._folder.is_alive()
            events = self._tail.poll()
            if not self._folder.path.is_dir():
                problem = f"The run folder {self._folder.path} is gone."
        except OSError as error:
            problem = f"{self._folder.path} cannot be read: {error.strerror or error}"
        self._view = fold(self._view, events)
        if not alive and not problem and self._view.end != "completed" and self._is_full():
            problem = "The disk of the run folder is full. Make room, then u resumes: what is done is kept."
        changed = bool(events) | self._poll_curves() | self._poll_result()
        last = self._last
        if last is not None and not changed and (last.alive, last.problem) == (alive, problem):
            return None
        self._last = Snapshot(
            self._view,
            self._evidence(),
            alive,
            self._result,
            problem,
            self._budget_s,
            self._race,
            outdated=self._result is not None and outdated(self._result.scoring),
        )
        return self._last

    def _is_full(self) -> bool:
        """Whether the disk takes nothing more: a runner that it killed could not write that down."""
        try:
            return disk_usage(self._folder.path).free < LEAST_ROOM
        except OSError:
            return False

    def _poll_curves(self) -> bool:
        changed = False
        if not self._inputs[0]:
            self._inputs = read_inputs(self._folder.path)
            changed = bool(self._inputs[0])
        for path in self._folder.runs.glob("*/metrics.jsonl"):
            tail = self._metrics.setdefault(path.parent.name, MetricsTail(path))
            changed |= tail.poll()
        return changed

    def _poll_result(self) -> bool:
        """Read the result anew when the file has changed; a broken one counts as none."""
        try:
            stamp = self._folder.result.stat().st_mtime_ns
        except OSError:
            if not self._folder.path.is_dir():
                return False  # what was read stays on the screen
            stamp = 0
        if stamp == self._result_stamp:
            return False
        self._result_stamp = stamp
        try:
            self._result = from_json(read_json(self._folder.result) or {}) if stamp else None
        except ResultFileError:
            self._result = None
        return True

    def _evidence(self) -> Evidence:
        healthy: list[Curves] = []
        faulty: dict[str, list[Curves]] = {}
        for run, tail in sorted(self._metrics.items()):
            if tail.curves is not None:
                fault = replay_of_run(run)
                (healthy if fault is None else faulty.setdefault(fault, [])).append(tail.curves)
        original_faulty, original_healthy = self._inputs
        return Evidence(
            original_healthy=original_healthy,
            original_faulty=original_faulty,
            proxy_healthy=tuple(healthy),
            proxy_faulty={fault: tuple(group) for fault, group in faulty.items()},
        )
