"""The log readers in force: decorators for ours, the entry points for others (``rl_diagnose.log_readers``).

A reader is a pure module. One for text has two functions: `recognises` tells one of its metric lines from any other
text, and the decorated generator turns lines into records. One for whole files looks at a file's first bytes
instead, and is given the stream. An entry point names anything whose import runs a decorator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import BinaryIO

from diagnose.logs.canonical import Aliases
from diagnose.logs.model import Record, Rejected
from diagnose.logs.text import Line, Piece

GROUP = "rl_diagnose.log_readers"
_OURS = (
    "verl_file",
    "verl_console",
    "trl_console",
    "json_lines",
    "named_dicts",
    "prime_rl",
    "nemo_rl",
    "mindspeed_rl",
    "json_document",
    "tensorboard",
    "wandb_file",
    "mlflow_db",
    "table",
    "parquet",
)
HEAD = 4096
"""Bytes of a file that its reader is chosen by."""

Records = Callable[[Iterable[Line]], Iterator[Record | Rejected]]
PieceRecords = Callable[[Iterable[Piece]], Iterator[Record | Rejected]]
FileRecords = Callable[[BinaryIO], Iterator[Record | Rejected]]


@dataclass(frozen=True)
class Reader:
    """One log format made of lines.

    Attributes:
        name: Name of the format, as `Import.format` has it.
        title: The same for humans.
        recognises: Whether a text is a metric line of this format. Called on every kind of text, so it must
            be quick to say no.
        records: Lines → records and rejected lines, streaming. Never raises for what a line says.
        aliases: How the format's keys map to canonical metrics.
        needles: Byte strings of which every line that matters has one, so that others are never looked at;
            () for a format that needs all lines.
        fast: The same as `records` for pieces that are not decoded yet, None for a format without.
        hints: Byte strings of which every line that `recognises` accepts has one; `needles` where not given.
    """

    name: str
    title: str
    recognises: Callable[[str], bool]
    records: Records
    aliases: Aliases
    needles: tuple[bytes, ...] = ()
    fast: PieceRecords | None = None
    hints: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class FileReader:
    """One log format that is a file as a whole.

    Attributes:
        name: As in `Reader`.
        title: As in `Reader`.
        recognises: Whether the first `HEAD` bytes are those of such a file.
        records: A seekable binary stream → records and rejected entries, streaming where the format allows it.
            Raises only LogError, for a file of which nothing can be read.
        aliases: As in `Reader`.
        grows: Whether `records` can follow a file that is still written to (it asks for the next bytes only).
    """

    name: str
    title: str
    recognises: Callable[[bytes], bool]
    records: FileRecords
    aliases: Aliases
    grows: bool = False


_registered: dict[str, Reader] = {}
_files: dict[str, FileReader] = {}


def reader(
    name: str,
    title: str,
    recognises: Callable[[str], bool],
    aliases: Aliases,
    needles: tuple[bytes, ...] = (),
    fast: PieceRecords | None = None,
    hints: tuple[bytes, ...] = (),
) -> Callable[[Records], Records]:
    """Register the decorated generator as the reader of a format; see `Reader` for the arguments."""

    def register(records: Records) -> Records:
        assert name not in _registered | _files, f"two log readers are called {name}"
        _registered[name] = Reader(name, title, recognises, records, aliases, needles, fast, hints or needles)
        return records

    return register


def file_reader(
    name: str, title: str, recognises: Callable[[bytes], bool], aliases: Aliases, grows: bool = False
) -> Callable[[FileRecords], FileRecords]:
    """Register the decorated generator as the reader of a kind of file; see `FileReader` for the arguments."""

    def register(records: FileRecords) -> FileRecords:
        assert name not in _registered | _files, f"two log readers are called {name}"
        _files[name] = FileReader(name, title, recognises, records, aliases, grows)
        return records

    return register


@cache
def readers() -> dict[str, Reader]:
    """Return all readers of lines by name, ours and those of installed packages, in the order of their names.

    A package whose reader cannot be loaded is left out with a warning: it must not keep anybody from reading
    a log.
    """
    for module in _OURS:
        import_module(f"diagnose.logs.{module}")
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # whatever goes wrong in a foreign package
            warnings.warn(f"log reader {point.name!r} can't be loaded: {error}", stacklevel=2)
    return dict(sorted(_registered.items()))


def file_readers() -> dict[str, FileReader]:
    """Return all readers of whole files by name, like `readers`."""
    readers()
    return dict(sorted(_files.items()))
