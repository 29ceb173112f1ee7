"""A path or ``-`` → `Import`: opens the log, finds its reader, says clearly when nothing in it is usable."""

from __future__ import annotations

import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

import numpy as np

from diagnose.errors import DiagnoseError, LogError
from diagnose.logs.assemble import assemble
from diagnose.logs.model import Counts, Import, Record, Rejected, Run
from diagnose.logs.registry import Reader, readers
from diagnose.logs.sniff import sniff
from diagnose.logs.text import MAX_LINE, Line, count, lines, printable

MAX_REJECTED = 200
"""Rejected lines that an import lists; the others are counted."""
MAX_STREAM = 1 << 30
"""Most bytes taken from a pipe, which has to be kept to be read twice. Files have no limit."""
_IN_MEMORY = 64 << 20
_MAGIC = {
    b"\x1f\x8b": "gzip: unpack it first",
    b"PK": "a zip archive: unpack it first",
    b"PAR1": "a parquet file",
    b"SQLite": "an SQLite database",
}


def read(path: str | Path, log_format: str | None = None) -> Import:
    """Read a training log, whatever is in it.

    Args:
        path: A file, or "-" for stdin.
        log_format: Name of a reader (`registry.readers`); None: the reader is found by looking at the lines.

    Returns:
        The runs with at least one finite value of a known metric among them.

    Raises:
        LogError: The log can't be opened, or nothing usable is in it; the message has the counts.
        DiagnoseError: `log_format` is unknown.
    """
    source = "stdin" if str(path) == "-" else printable(str(path))
    if log_format is not None and log_format not in readers():
        raise DiagnoseError(f"unknown log format {log_format!r}; known: {', '.join(readers())}")
    with _open(path, source) as stream:
        try:
            reader = readers()[log_format] if log_format else sniff(lines(stream), readers())
            stream.seek(0)
            if reader is None:
                raise _unknown(stream, source)
            return _import(stream, source, reader)
        except OSError as error:
            raise LogError(f"{source}: {error.strerror or error}") from error


@contextmanager
def _open(path: str | Path, source: str) -> Iterator[BinaryIO]:
    """Open a log so that it can be read twice: pipes are kept in memory, then on disk.

    Only opening and copying are guarded here: an error of the caller's block is not the file's.
    """
    with SpooledTemporaryFile(_IN_MEMORY) as kept:
        stream = cast(BinaryIO, kept)
        try:
            if str(path) == "-":
                _copy(sys.stdin.buffer, stream, source)
            elif (file := Path(path)).is_dir():
                raise LogError(f"{source}: is a folder", "name one log file in it")
            elif file.is_file():
                stream = file.open("rb")
            else:
                with file.open("rb") as pipe:
                    _copy(pipe, stream, source)
        except OSError as error:
            raise LogError(f"{source}: {error.strerror or error}") from error
        except ValueError as error:
            if isinstance(error, LogError):
                raise
            raise LogError(f"{source}: no such file") from error  # a NUL byte in the path
        with stream:
            yield stream


def _copy(pipe: BinaryIO, kept: BinaryIO, source: str) -> None:
    """Copy a pipe to its end, or to the limit."""
    size = 0
    while chunk := pipe.read(1 << 16):
        size += len(chunk)
        if size > MAX_STREAM:
            raise LogError(f"{source}: more than {MAX_STREAM >> 20} MiB from a pipe", "name a file instead")
        kept.write(chunk)
    kept.seek(0)


def _import(stream: BinaryIO, source: str, reader: Reader) -> Import:
    """Read the whole stream with one reader."""
    rejected: list[Rejected] = []
    total = {"lines": 0, "records": 0, "rejected": 0}

    def reject(item: Rejected) -> None:
        total["rejected"] += 1
        if len(rejected) < MAX_REJECTED:
            rejected.append(item)

    def text() -> Iterator[Line]:
        for line in lines(
            stream, lambda number: reject(Rejected(number, f"longer than {MAX_LINE} characters"))
        ):
            total["lines"] = line.number
            yield line

    def kept() -> Iterator[Record]:
        for item in reader.records(text()):
            if isinstance(item, Rejected):
                reject(item)
            else:
                total["records"] += 1
                yield item

    runs = assemble(kept(), source, reader.aliases)
    counts = Counts(**total)
    _check_usable(runs, source, counts)
    return Import(source, reader.name, runs, tuple(rejected), counts)


def _check_usable(runs: Iterable[Run], source: str, counts: Counts) -> None:
    """Raise LogError unless some run has a finite value of a known metric."""
    runs = list(runs)
    said = _said(counts)
    if any(np.isfinite(values).any() for run in runs for values in run.curves.values.values()):
        return
    if not counts.records:
        raise LogError(f"{source}: no metric line ({said})")
    logged = {name: steps for run in runs for name, steps in run.curves.nonfinite.items()}
    if logged:
        first = min(steps[0] for steps in logged.values())
        raise LogError(
            f"{source}: every value of {_some(logged)} is NaN or infinite, from step {first} on ({said})",
            "a comparison needs values from before the collapse: give the part of the log that comes before",
        )
    keys = list(dict.fromkeys(key for run in runs for key in run.unmapped))
    raise LogError(
        f"{source}: none of its {len(keys)} keys is a known metric with numbers: {_some(keys)} ({said})",
        "keys are verl's, values are numbers without quotes",
    )


def _some(names: Iterable[str]) -> str:
    """Return the first ten names."""
    names = list(names)
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")


def _said(counts: Counts) -> str:
    return (
        f"{count(counts.lines, 'line')}, {count(counts.records, 'metric line')}, {counts.rejected} rejected"
    )


def _unknown(stream: BinaryIO, source: str) -> LogError:
    """Return the error for a log without a single metric line of a known format."""
    head = stream.read(4096)
    stream.seek(0)
    if not head:
        return LogError(f"{source}: the file is empty")
    too_long = 0

    def skip(number: int) -> None:
        nonlocal too_long
        too_long += 1

    last = 0
    for line in lines(stream, skip):
        last = line.number
    said = f"{count(last, 'line')}, 0 metric lines" + (
        f", {too_long} longer than {MAX_LINE} characters" if too_long else ""
    )
    what = next((what for magic, what in _MAGIC.items() if head.startswith(magic)), None)
    if what is None and not head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) and 10 * head.count(0) > len(head):
        what = "binary data"
    known = ", ".join(reader.title for reader in readers().values())
    return LogError(
        f"{source}: " + (f"this is {what}" if what else "no metric line of a known format") + f" ({said})",
        f"formats that can be read: {known}",
    )
