"""Which reader a log is for: the first whose metric lines turn up `ENOUGH` times, else the one with most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diagnose.logs.registry import FileReader, Reader
from diagnose.logs.text import Line

ENOUGH = 5
"""Metric lines that decide: a log may quote a line of another format, but not five before its own."""


def sniff(lines: Iterable[Line], readers: Mapping[str, Reader]) -> Reader | None:
    """Return the reader for these lines, None when no line is a metric line of any format.

    Stops reading as soon as it knows, which is after a few metric lines; a long preamble (configuration
    dumps, worker start-up) is passed over. Linear in the text.
    """
    found = dict.fromkeys(readers, 0)
    for line in lines:
        for name, reader in readers.items():
            if reader.recognises(line.text):
                found[name] += 1
                if found[name] == ENOUGH:
                    return reader
    best = max(found, key=lambda name: found[name], default=None)
    return readers[best] if best is not None and found[best] else None


def sniff_head(head: bytes, readers: Mapping[str, FileReader]) -> FileReader | None:
    """Return the reader for a file that begins with these bytes, None for a file made of lines."""
    return next((reader for reader in readers.values() if reader.recognises(head)), None)
