"""From the bytes of somebody else's log to clean lines: linear time, bounded memory, no encoding errors.

The bytes are cut into pieces before they are decoded, so that a reader which knows what its metric lines contain
(`pieces` with a needle) never pays for the chatter between them.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import BinaryIO, NamedTuple, cast

import numpy as np

MAX_LINE = 1 << 20
"""Longest line that is looked at, in bytes; metric lines of real runs stay under 20 thousand."""
_CHUNK = 1 << 17  # what is searched, counted and cut stays in the cache

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC and its kin: window titles, hyperlinks
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHORT = 1 << 12


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


class Piece(NamedTuple):
    """A `Line` before it is decoded.

    Attributes:
        number: As in `Line`.
        raw: Bytes between two line breaks or carriage returns.
        whole: As in `Line`.
    """

    number: int
    raw: bytes
    whole: bool = True


def lines(
    stream: BinaryIO,
    too_long: Callable[[int], None] = lambda number: None,
    needles: tuple[bytes, ...] = (),
    at_end: Callable[[int], None] = lambda number: None,
) -> Iterator[Line]:
    """Yield the non-empty lines of a byte stream.

    UTF-8 unless a byte-order mark says UTF-16; what does not decode becomes U+FFFD.

    Args:
        stream: Binary stream at its beginning.
        too_long: Called with the number of each line that is longer than `MAX_LINE`; such a line is left out.
        needles: Only lines with one of these byte strings are wanted; () means all.
        at_end: Called with the number of the last line.
    """
    for number, raw, whole in pieces(stream, too_long, needles, at_end):
        if text := clean(raw):
            yield Line(number, text, whole)


def pieces(
    stream: BinaryIO,
    too_long: Callable[[int], None] = lambda number: None,
    needles: tuple[bytes, ...] = (),
    at_end: Callable[[int], None] = lambda number: None,
) -> Iterator[Piece]:
    """Yield the non-empty pieces of a byte stream; see `lines`.

    With needles, a line that is too long is only reported where a needle is in the part that was looked at.
    """
    first = stream.read(_CHUNK)
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        stream = cast(BinaryIO, _Utf16(stream, first))
        first = stream.read(_CHUNK)
    first = first.removeprefix(codecs.BOM_UTF8)
    find = _finder(needles) if needles else None
    number, kept, lost = 1, b"", 0  # lost: bytes of the present line that were thrown away
    chunk = first
    while chunk:
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not cut:
            if len(kept) + len(chunk) + lost <= MAX_LINE:
                kept += chunk
            else:
                lost += len(kept) + len(chunk)
                kept = b""
        else:
            if lost:
                skip = _first_break(chunk, 0, chunk.find(b"\n") if b"\n" in chunk else cut)
                too_long(number)
                number += chunk[skip - 1] == ord("\n")
                lost, kept, chunk, cut = 0, b"", chunk[skip:], cut - skip
            block, end = (kept + chunk, len(kept) + cut) if kept else (chunk, cut)
            kept = chunk[cut:]
            if find is None:
                yield from _all(block[:end], number, too_long)
            else:
                yield from find(block, end, number, too_long)
            number += _breaks(block, 0, end)
        chunk = stream.read(_CHUNK)
    if lost or len(kept) > MAX_LINE:
        too_long(number)
    elif kept and (find is None or any(needle in kept for needle in needles)):
        yield Piece(number, kept, whole=False)
    at_end(number if kept or lost else number - 1)


def _all(block: bytes, number: int, too_long: Callable[[int], None]) -> Iterator[Piece]:
    """Yield every non-empty piece of a block that ends with a break."""
    for row in block.split(b"\n"):
        for raw in row.split(b"\r") if b"\r" in row else (row,):
            if len(raw) > MAX_LINE:
                too_long(number)
            elif raw:
                yield Piece(number, raw)
        number += 1


def _finder(
    needles: tuple[bytes, ...],
) -> Callable[[bytes, int, int, Callable[[int], None]], Iterator[Piece]]:
    """Return a function like `_all` for the pieces of block[:stop] that have one of the needles."""

    def find(block: bytes, stop: int, number: int, too_long: Callable[[int], None]) -> Iterator[Piece]:
        present = tuple(
            needle for needle in needles if needle in block
        )  # far faster than a search for any of them
        if not present:
            return
        one, several = present[0], re.compile(b"|".join(map(re.escape, present)))
        start, newline = 0, -1
        while True:
            if len(present) == 1:
                at = block.find(one, start, stop)
            else:
                found = several.search(block, start, stop)
                at = -1 if found is None else found.start()
            if at < 0:
                return
            begin = max(block.rfind(b"\n", start, at), block.rfind(b"\r", start, at), start - 1) + 1
            if newline < at:  # looked for once a line, however many carriage returns are in it
                newline = block.find(b"\n", at, stop)
                newline = stop if newline < 0 else newline
            end = _first_break(block, at, newline) - 1
            if begin > start:
                number += _breaks(block, start, begin)
            if end - begin > MAX_LINE:
                too_long(number)
            else:
                yield Piece(number, block[begin:end])
            start = end + 1
            number += block[end : end + 1] == b"\n"

    return find


def _first_break(block: bytes, start: int, newline: int) -> int:
    """Return the position after the first carriage return before a line break, or after that line break."""
    back = block.find(b"\r", start, newline)
    return (newline if back < 0 else back) + 1


def _breaks(block: bytes, start: int, end: int) -> int:
    """Return the number of line breaks in block[start:end]."""
    if end - start < _SHORT:
        return block.count(b"\n", start, end)
    return int(np.count_nonzero(np.frombuffer(block, np.uint8, end - start, start) == ord("\n")))


class _Utf16(io.RawIOBase):
    """UTF-16 as a stream of UTF-8."""

    def __init__(self, stream: BinaryIO, first: bytes) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self.stream = stream
        self.first = first

    def read(self, size: int = -1) -> bytes:
        while True:
            raw, self.first = self.first or self.stream.read(_CHUNK), b""
            text = self.decoder.decode(raw, final=not raw).encode("utf-8", "replace")
            if text or not raw:
                return text


def clean(raw: bytes) -> str:
    """Return decoded text without terminal sequences, control characters and blanks around it; tabs inside stay."""
    return strip(raw.decode("utf-8", "replace")).strip()


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
