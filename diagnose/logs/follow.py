"""A log that is still written to: its canonical points as they come.

A line counts when its line break is there. A file that gets shorter or is replaced (rotation) is read again from its
beginning.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from diagnose.errors import DiagnoseError, LogError
from diagnose.logs.canonical import Aliases, Offer
from diagnose.logs.importer import Intake, choose
from diagnose.logs.model import Record
from diagnose.logs.registry import FileReader, Reader, file_readers, readers
from diagnose.logs.source import GZIP, file_errors, name_of

POLL = 0.5
"""Seconds between two looks at the file."""
MAX_KEYS = 20_000
"""Distinct raw keys that are remembered."""


class Point(NamedTuple):
    """What one record says under canonical names.

    Attributes:
        step: Training step.
        data: Canonical name → value in canonical units; NaN and ±inf as logged.
        run: Name of the run within the log.
    """

    step: int
    data: Mapping[str, float]
    run: str


def follow(
    path: str | Path, idle: Callable[[], bool] | None = None, log_format: str | None = None
) -> Iterator[Point]:
    """Yield the canonical points of a log, those that are there and those to come.

    Args:
        path: The log: a file that its trainer writes to.
        idle: Called whenever there is nothing new; returns True to end. None: wait, and go on for ever.
        log_format: Name of a reader, None to find it.

    Raises:
        LogError: The log can't be followed: no such file, a folder, a pipe, a compressed or a database file.
        DiagnoseError: `log_format` is unknown.
    """
    source, file = name_of(path), Path(path)
    wait = idle or _sleep
    if log_format is not None and log_format not in readers() | file_readers():
        raise DiagnoseError(f"unknown log format {log_format!r}")
    with file_errors(source):
        if not file.is_file():
            raise LogError(f"{source}: only a file can be followed", "name the file that the trainer writes")
        reader = None
        while reader is None:
            with file.open("rb") as stream:
                packed = stream.read(len(GZIP)) == GZIP
                stream.seek(0)
                reader = None if packed else choose(stream, log_format)
            if packed or (isinstance(reader, FileReader) and not reader.grows):
                what = "a compressed file" if packed else cast(FileReader, reader).title
                raise LogError(
                    f"{source}: {what} can't be followed", "read it as it is now, without --follow"
                )
            if reader is None and wait():  # no metric line yet
                return
        assert reader is not None
        with _Growing(file, isinstance(reader, FileReader), wait) as growing:
            yield from _points(Intake().records(cast(BinaryIO, growing), reader), reader)


def _sleep() -> bool:
    time.sleep(POLL)
    return False


def _points(records: Iterator[Record], reader: Reader | FileReader) -> Iterator[Point]:
    """Yield the known metrics of each record, of several keys for one of them the best."""
    offers: dict[str, Offer | None] = {}
    for record in records:
        best: dict[str, tuple[int, float]] = {}
        for key, value in record.data.items():
            offer = _offer(key, offers, reader.aliases)
            if offer is not None and (offer.canonical not in best or offer.rank < best[offer.canonical][0]):
                best[offer.canonical] = offer.rank, value * offer.scale
        if best:
            yield Point(record.step, {name: value for name, (_, value) in best.items()}, record.run)


def _offer(key: str, offers: dict[str, Offer | None], aliases: Aliases) -> Offer | None:
    if key not in offers:
        if len(offers) >= MAX_KEYS:
            return aliases.offer(key)
        offers[key] = aliases.offer(key)
    return offers[key]


class _Growing(io.RawIOBase):
    """A file that ends only when told to."""

    def __init__(self, path: Path, exact: bool, idle: Callable[[], bool]) -> None:
        """Open `path`.

        Args:
            path: The file.
            exact: Whether `read` waits for all the bytes that were asked for, or for any.
            idle: Called before each wait; the stream ends once it returns True.
        """
        self.path, self.exact, self.idle = path, exact, idle
        self.file = path.open("rb")
        self.ended = False

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; fewer than asked for only where any will do, or at the end."""
        found = b""
        while not self.ended:
            found += self.file.read(size - len(found))
            if len(found) == size or (found and not self.exact):
                break
            self.ended = self.idle()
            self._renew()
        return found

    def _renew(self) -> None:
        """Go back to the beginning of a file that was cut or replaced."""
        try:
            now = self.path.stat()
        except OSError:
            return  # gone for the moment, as between two steps of a rotation
        if now.st_ino != os.fstat(self.file.fileno()).st_ino:
            self.file.close()
            self.file = self.path.open("rb")
        elif now.st_size < self.file.tell():
            self.file.seek(0)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self.file.close()
        super().close()
