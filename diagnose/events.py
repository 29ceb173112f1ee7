"""What a run says while it goes on: the lines of `events.jsonl`, typed.

The runner appends, everybody else reads: the command line, the TUI and CI are viewers of the same file. A
reader survives a half-written last line, and ignores kinds and fields that it doesn't know.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

STAGES = ("import", "build", "replay", "score", "report")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `t` is Unix time in seconds, stamped when the event is appended."""

    kind: ClassVar[str] = ""
    t: float = 0.0

    def to_line(self) -> str:
        """Return the event as one line of JSON, without the newline. Non-finite numbers become null."""
        body = {"t": round(self.t, 3), "kind": self.kind} | {
            key: value for key, value in asdict(self).items() if key != "t"
        }
        return json.dumps(_finite(body), separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class SessionEvent(Event):
    """A runner took up the session: the first event, and the first again after every resumption."""

    kind: ClassVar[str] = "session"
    name: str
    symptom: str
    candidates: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StageEvent(Event):
    """A stage started, is done, was skipped because its result is there, or failed."""

    kind: ClassVar[str] = "stage"
    stage: str
    status: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class RunEvent(Event):
    """A replay was queued, started, is done or failed; `fault` is None for a healthy one."""

    kind: ClassVar[str] = "run"
    run: str
    fault: str | None
    seed: int
    status: str
    reason: str = ""
    witness: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """A replay finished a training step; `data` holds a handful of key metrics, None where non-finite."""

    kind: ClassVar[str] = "step"
    run: str
    step: int
    steps: int
    data: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NoteEvent(Event):
    """A sentence for humans; `level` is "info", "warn" or "error" (why the session failed, and the mend)."""

    kind: ClassVar[str] = "note"
    text: str
    level: str = "info"
    mend: str = ""


@dataclass(frozen=True, kw_only=True)
class VerdictEvent(Event):
    """The verdict is in `result.json`."""

    kind: ClassVar[str] = "verdict"
    verdict: str
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The runner's last word: "completed", "interrupted" or "failed", and the exit code for its viewer."""

    kind: ClassVar[str] = "end"
    status: str
    exit_code: int


_BY_KIND: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (SessionEvent, StageEvent, RunEvent, StepEvent, NoteEvent, VerdictEvent, EndEvent)
}


def _finite(value: Any) -> Any:
    """Replace non-finite floats by None, all the way down."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def from_line(line: str) -> Event | None:
    """Return the event of one line; None for a broken line, an unknown kind, or one that lacks a field."""
    try:
        raw = json.loads(line)
        cls = _BY_KIND[raw.pop("kind")]
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in raw.items()
            if key in known
        }
        return cls(**values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class EventLog:
    """The writer of an event file; one `os.write` a line, so that lines of two writers never interleave."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # the last writer was killed in the middle of a line

    def append(self, event: Event) -> None:
        """Append an event, stamped with the present time. Raises OSError (a full disk)."""
        os.write(self._fd, (replace(event, t=time.time()).to_line() + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Tail:
    """A reader that hands out what was appended since it last looked."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    def poll(self) -> list[Event]:
        """Return the events completed since the last call, oldest first. A missing file has none yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = (from_line(line.decode("utf-8", "replace")) for line in lines)
        return [event for event in events if event is not None]
