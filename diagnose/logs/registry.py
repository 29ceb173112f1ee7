"""The log readers in force: a decorator for ours, the entry points for others (``rl_diagnose.log_readers``).

A reader is a pure module of two functions: `recognises` tells one of its metric lines from any other text,
and the decorated generator turns lines into records. An entry point names anything whose import runs the
decorator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from diagnose.logs.canonical import Aliases
from diagnose.logs.model import Record, Rejected
from diagnose.logs.text import Line

GROUP = "rl_diagnose.log_readers"
_OURS = ("verl_file", "verl_console")

Records = Callable[[Iterable[Line]], Iterator[Record | Rejected]]


@dataclass(frozen=True)
class Reader:
    """One log format.

    Attributes:
        name: Name of the format, as `Import.format` has it.
        title: The same for humans.
        recognises: Whether a text is a metric line of this format. Called on every kind of text, so it must
            be quick to say no.
        records: Lines → records and rejected lines, streaming. Never raises for what a line says.
        aliases: How the format's keys map to canonical metrics.
    """

    name: str
    title: str
    recognises: Callable[[str], bool]
    records: Records
    aliases: Aliases


_registered: dict[str, Reader] = {}


def reader(
    name: str, title: str, recognises: Callable[[str], bool], aliases: Aliases
) -> Callable[[Records], Records]:
    """Register the decorated generator as the reader of a format; see `Reader` for the arguments."""

    def register(records: Records) -> Records:
        assert name not in _registered, f"two log readers are called {name}"
        _registered[name] = Reader(name, title, recognises, records, aliases)
        return records

    return register


@cache
def readers() -> dict[str, Reader]:
    """Return all readers by name, ours and those of installed packages, in the order of their names.

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
