"""From the bytes of somebody else's log to clean lines: linear time, bounded memory, no encoding errors."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import BinaryIO, NamedTuple

MAX_LINE = 1 << 20
"""Longest line that is looked at, in characters; metric lines of real runs stay under 20 thousand."""
_CHUNK = 1 << 16

_BREAK = re.compile(r"[\r\n]")
_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC and its kin: window titles, hyperlinks
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Line(NamedTuple):
    """One piece of text between two line breaks or carriage returns.

    Attributes:
        number: Line number counted from 1; what a progress bar overwrites with carriage returns is one line.
        text: The text, free of control characters (tabs stay) and terminal sequences.
        whole: False for a last line without a line break, which may have been cut anywhere.
    """

    number: int
    text: str
    whole: bool = True


def lines(stream: BinaryIO, too_long: Callable[[int], None] = lambda number: None) -> Iterator[Line]:
    """Yield the non-empty lines of a byte stream.

    UTF-8 unless a byte-order mark says UTF-16; what does not decode becomes U+FFFD.

    Args:
        stream: Binary stream at its beginning.
        too_long: Called with the number of each line that is longer than `MAX_LINE`; such a line is left out.
    """
    decoder: codecs.IncrementalDecoder | None = None
    number, size, pieces = 1, 0, [""]

    def line(whole: bool) -> Iterator[Line]:
        if size > MAX_LINE:
            too_long(number)
        elif text := strip("".join(pieces)).strip():
            yield Line(number, text, whole)

    while chunk := stream.read(_CHUNK):
        if decoder is None:
            utf16 = chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            decoder = codecs.getincrementaldecoder("utf-16" if utf16 else "utf-8-sig")("replace")
        text = decoder.decode(chunk)
        start = 0
        for found in _BREAK.finditer(text):
            size += found.start() - start
            pieces.append(text[start : found.start()])
            yield from line(whole=True)
            size, pieces = 0, []
            start = found.end()
            number += found.group() == "\n"
        size += len(text) - start
        if size <= MAX_LINE:
            pieces.append(text[start:])
        else:
            pieces = []  # already too long: only its size still counts
    if decoder is not None:
        rest = decoder.decode(b"", final=True)
        size += len(rest)
        pieces.append(rest)
        yield from line(whole=False)


def strip(text: str) -> str:
    """Return `text` without terminal sequences and control characters; tabs stay."""
    if _CONTROL.search(text) is None:
        return text
    return _CONTROL.sub("", _ANSI.sub("", text))


def key_name(raw: str) -> str:
    """Return a raw metric key as it is kept (`printable`); the same few keys come again in every line."""
    return _known_key(raw) if len(raw) <= 200 else printable(raw)


@lru_cache(maxsize=4096)
def _known_key(raw: str) -> str:
    return printable(raw)


def printable(text: str, limit: int = 200) -> str:
    """Return `text` as something safe to keep and show: printable characters only, at most `limit` of them.

    Besides control characters this drops the bidirectional overrides that make a terminal show other text than it
    was given; all blanks become spaces.
    """
    kept = (char if char.isprintable() else " " * char.isspace() for char in strip(text[: 4 * limit]))
    clean = "".join(kept)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def count(number: int, what: str) -> str:
    """Return a number with its noun: "1 line", "2 lines"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
