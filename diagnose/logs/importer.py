"""A path or ``-`` → `Import`: opens the log, finds its reader, says clearly when nothing in it is usable."""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from diagnose.errors import DiagnoseError, LogError
from diagnose.logs.assemble import assemble
from diagnose.logs.model import Counts, Import, Record, Rejected, Run
from diagnose.logs.registry import HEAD, FileReader, Reader, file_readers, readers
from diagnose.logs.sniff import sniff, sniff_head
from diagnose.logs.source import Gunzip, name_of, opened
from diagnose.logs.text import count, lines, pieces
from diagnose.logs.values import quoted_number

MAX_REJECTED = 200
"""Rejected lines that an import lists; the others are counted."""
TOO_LONG = "longer than 1 MiB"
_MAGIC = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"BZh": "compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "compressed with xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"\x1f\x8b": "a damaged gzip file",
}


def read(path: str | Path, log_format: str | None = None) -> Import:
    """Read a training log, whatever is in it.

    Args:
        path: A file, a folder, or "-" for stdin.
        log_format: Name of a reader (`registry.readers`, `registry.file_readers`); None: the reader is found by
            looking at the log.

    Returns:
        The runs with at least one finite value of a known metric among them.

    Raises:
        LogError: The log can't be opened, or nothing usable is in it; the message has the counts.
        DiagnoseError: `log_format` is unknown.
    """
    known = readers() | file_readers()
    if log_format is not None and log_format not in known:
        raise DiagnoseError(f"unknown log format {log_format!r}; known: {', '.join(known)}")
    if str(path) != "-" and _is_folder(path):
        from diagnose.logs.folder import read_folder

        return read_folder(Path(path), log_format)
    source = name_of(path)
    with opened(path) as stream:
        try:
            reader = choose(stream, log_format)
            if reader is None:
                raise _unknown(stream, source)
            intake = Intake()
            runs = assemble(intake.records(stream, reader), source, reader.aliases)
            counts = intake.counts()
            check_usable(runs, source, counts)
            notes = (stream.damage,) if isinstance(stream, Gunzip) and stream.damage else ()
            return Import(source, reader.name, runs, tuple(intake.rejected), counts, notes)
        except OSError as error:
            raise LogError(f"{source}: {error.strerror or error}") from error
        except LogError as error:
            if str(error).startswith(f"{source}: "):
                raise
            raise LogError(f"{source}: {error}", error.mend, error.names) from error


def _is_folder(path: str | Path) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def choose(stream: BinaryIO, log_format: str | None = None) -> Reader | FileReader | None:
    """Return the reader for a stream, which is put back to its beginning; None where no reader knows it."""
    if log_format is not None:
        return (readers() | file_readers())[log_format]
    head = stream.read(HEAD)
    stream.seek(0)
    if (found := sniff_head(head, file_readers())) is not None:
        return found
    every = readers()
    # With the hints of all readers, chatter before the first metric line is passed over fast.
    hints = [reader.hints for reader in every.values()]
    needles = tuple(sorted(set(chain.from_iterable(hints)))) if all(hints) else ()
    reader = sniff(lines(stream, needles=needles), every)
    stream.seek(0)
    return reader


@dataclass
class Intake:
    """The records of a log on their way to `assemble`, counted.

    Attributes:
        file: Name of the file within a folder, "" for a log that is one file.
        rejected: The first rejected lines.
        lines: Number of the last line or record.
        taken: Number of records.
        refused: Number of rejected lines.
    """

    file: str = ""
    rejected: list[Rejected] = field(default_factory=list)
    lines: int = 0
    taken: int = 0
    refused: int = 0

    def records(self, stream: BinaryIO, reader: Reader | FileReader) -> Iterator[Record]:
        """Yield the records that a reader finds in a stream."""
        found: Iterable[Record | Rejected]
        if isinstance(reader, FileReader):
            found = reader.records(stream)
        elif reader.fast is not None:
            found = reader.fast(pieces(stream, self._too_long, reader.needles, self._end))
        else:
            found = reader.records(lines(stream, self._too_long, reader.needles, self._end))
        for item in found:
            if isinstance(item, Record):
                self.taken += 1
                yield item
            else:
                self.reject(item)
            if item.line > self.lines:
                self.lines = item.line

    def _too_long(self, number: int) -> None:
        self.reject(Rejected(number, TOO_LONG))

    def _end(self, number: int) -> None:
        self.lines = max(self.lines, number)

    def reject(self, item: Rejected) -> None:
        """Take note of a line that was rejected."""
        self.refused += 1
        if len(self.rejected) < MAX_REJECTED:
            self.rejected.append(Rejected(item.line, item.reason, self.file))

    def counts(self) -> Counts:
        """Return the totals."""
        return Counts(self.lines, self.taken, self.refused)


def check_usable(runs: Sequence[Run], source: str, counts: Counts) -> None:
    """Raise LogError unless some run has a finite value of a known metric."""
    said = _said(counts)
    if any(np.isfinite(values).any() for run in runs for values in run.curves.values.values()):
        return
    if not counts.records and not counts.lines:
        raise LogError(f"{source}: nothing in it but a beginning: no line or entry follows")
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
    none = "its only key is not" if len(keys) == 1 else f"none of its {len(keys)} keys is"
    raise LogError(
        f"{source}: {none} a known metric with numbers: {_some(keys)} ({said})",
        "rename them to verl's names (docs/logs.md lists what is known), values are numbers",
        tuple(keys),
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
    head = stream.read(HEAD)
    stream.seek(0)
    if not head:
        damage = stream.damage if isinstance(stream, Gunzip) else ""
        return LogError(f"{source}: {damage or 'the file is empty'}")
    too_long = last = 0

    def skip(number: int) -> None:
        nonlocal too_long, last
        too_long += 1
        last = max(last, number)

    for piece in pieces(stream, skip):
        last = max(last, piece.number)
    said = f"{count(last, 'line')}, 0 metric lines" + (f", {too_long} {TOO_LONG}" if too_long else "")
    what = next((what for magic, what in _MAGIC.items() if head.startswith(magic)), None)
    if what is None and not head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) and _is_binary(head):
        what = "binary data"
    if what is None and _lacks_step(head):
        return LogError(
            f"{source}: a table without a column for the step ({said})",
            "name that column step, global_step or iteration",
        )
    known = ", ".join(reader.title for reader in (readers() | file_readers()).values())
    return LogError(
        f"{source}: " + (f"this is {what}" if what else "no metric line of a known format") + f" ({said})",
        f"formats that can be read: {known}",
    )


def _is_binary(head: bytes) -> bool:
    """Whether a tenth of the bytes at a file's beginning are none of a text."""
    text = head.decode("utf-8", "replace")
    odd = sum(char == "\ufffd" or (char < " " and char not in "\t\n\r\x1b") for char in text)
    return 10 * odd > len(text)


def _lacks_step(head: bytes) -> bool:
    """Whether a file begins like a table: two or more names, and under them as many numbers."""
    rows = head.decode("utf-8", "replace").split("\n")[:2]
    for separator in ",;\t":
        cells = [[cell.strip() for cell in row.split(separator)] for row in rows]
        if (
            len(cells) == 2
            and len(cells[0]) == len(cells[1]) > 1
            and all(re.fullmatch(r"[A-Za-z_][\w/ .@-]{0,100}", name) for name in cells[0])
            and all(quoted_number(cell) is not None for cell in cells[1] if cell)
        ):
            return True
    return False
