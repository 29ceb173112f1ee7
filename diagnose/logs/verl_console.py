"""verl's console: ``step:N - key:value - key:value …`` amid the output of everybody else.

In the wild the line is coloured, prefixed by Ray (``(TaskRunner pid=7)``, two generations of prefixes),
quoted, glued to a progress bar, and cut off at the end; values come as ``0.5``, ``nan``, ``np.float64(0.5)``,
``np.int32(2)``. Colours, control characters and carriage returns are gone when the text gets to `parse`
(`diagnose.logs.text`).

A gigabyte of metric lines must not take minutes, and a run prints the same keys in the same order nearly always:
`_Layout` reads such a line straight from its bytes, and whatever is unusual about it goes to `parse`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import VERL
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, Piece, clean, key_name, printable

NEEDLE = b"step:"
# "training/global_step:5" is a pair, not the beginning of a record.
_START = re.compile(r"(?<![\w/])step:(\d{1,12}) - ")
_START_BYTES = re.compile(rb"step:(\d{1,12}) - ")
# Repetitions are bounded, so that no line takes more than linear time.
_NUMBER = r"[-+]?(?:nan|inf|infinity|\d{1,330}(?:\.\d{1,330})?(?:e[-+]?\d{1,5})?)|none|null"
# A number must end where a blank or the text ends: one that is cut by another process's output is not
# trusted.
_PAIR = re.compile(
    rf"(?P<key>[^\s:]{{1,200}}|(?:val[-/]|test_score/)[^:]{{1,200}}):"  # data sets may have blanks in names
    rf"(?:(?P<plain>{_NUMBER})|[a-z_][\w.]{{0,40}}\((?P<wrapped>{_NUMBER})(?:,[^()]{{0,80}})?\))(?=\s|$)",
    re.IGNORECASE,
)
_METRIC_LIKE = re.compile(r"\w/\w[^\s:]{0,200}:")
_LAYOUTS = 4
"""Layouts that a log is expected to go through in turn: with validation, with a checkpoint, without."""


def parse(line: Line, pairs_before: int = 0) -> Iterator[Record | Rejected]:
    """Yield what one line holds: nothing for other text, else records (several when they were glued).

    Args:
        line: The line.
        pairs_before: Pairs of the record before, to tell whether a last line without a line break is
            complete.
    """
    starts = list(_START.finditer(line.text))
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(line.text)
        last = not line.whole and end == len(line.text)
        yield from _record(
            line.number, int(start[1]), line.text[start.end() : end], pairs_before if last else 0
        )


def _record(number: int, step: int, body: str, pairs_expected: int) -> Iterator[Record | Rejected]:
    """Yield the record of one ``step:`` and a note on what of it was unreadable."""
    body = body.rstrip()
    cut = body.endswith(" -") or body == "-"
    pieces = [piece for piece in body.removesuffix("-").split(" - ") if piece.strip()]
    found = [_PAIR.match(piece.strip()) for piece in pieces]
    unreadable = [piece for piece, pair in zip(pieces, found, strict=True) if pair is None]
    pairs = [pair for pair in found if pair is not None]
    if pairs and len(pieces) < pairs_expected and found[-1] is not None:
        pairs.pop()  # the end of the file came early, so 1e-0 may have been 1e-05
        cut = True
    if not any("/" in pair["key"] for pair in pairs):
        if _METRIC_LIKE.search(body):  # otherwise somebody's prose
            yield Rejected(number, f"step:{step} without a readable metric: {printable(body, 40)!r}")
        return
    texts = {key_name(pair["key"]): pair["plain"] or pair["wrapped"] for pair in pairs}
    decimals = {count for text in texts.values() if (count := _decimals(text)) is not None}
    yield Record(
        number,
        step,
        {key: _value(text) for key, text in texts.items()},
        decimals=decimals.pop() if len(decimals) == 1 else None,
    )
    if unreadable:
        yield Rejected(
            number,
            f"{len(unreadable)} of {len(pieces)} values unreadable, such as {printable(unreadable[0], 40)!r}",
        )
    elif cut:
        yield Rejected(number, f"cut off after {len(pairs)} values")


def _decimals(text: str) -> int | None:
    """Return the decimals of a printed number: 0 with an exponent, None where it doesn't show (5, nan)."""
    if "e" in text.lower() and text[-1].isdigit():
        return 0
    return len(text.partition(".")[2]) if "." in text else None


def _value(text: str) -> float:
    """Return a matched number; None and null are NaN."""
    return float("nan" if text.lower() in ("none", "null") else text)


@dataclass(frozen=True)
class _Layout:
    """The keys of a metric line in their order.

    Attributes:
        heads: For every pair what it starts with, the wrapper of its value included.
        known: (position, length of the head, length of what follows the number) of the keys in use.
        keys: Those keys.
        decimals: Decimals of all values, None where they differ.
    """

    heads: tuple[bytes, ...]
    known: tuple[tuple[int, int, int], ...]
    keys: tuple[str, ...]
    decimals: int | None

    @staticmethod
    def of(pairs: list[bytes], record: Record) -> _Layout | None:
        """Return the layout of a line that gave a complete record, None where it is too unusual for one."""
        if len(pairs) != len(record.data):
            return None
        heads: list[bytes] = []
        known: list[tuple[int, int, int]] = []
        keys: list[str] = []
        for position, (pair, key) in enumerate(zip(pairs, record.data, strict=True)):
            name, colon, value = pair.partition(b":")
            if not colon or name.decode("utf-8", "replace") != key:
                return None
            wrapper, bracket, rest = value.partition(b"(")
            wrapped = bool(bracket)
            if wrapped and not (rest.endswith(b")") and b"," not in rest):
                return None
            heads.append(name + colon + (wrapper + bracket if wrapped else b""))
            if VERL.offer(key) is not None:
                known.append((position, len(heads[-1]), int(wrapped)))
                keys.append(key)
        return _Layout(tuple(heads), tuple(known), tuple(keys), record.decimals) if known else None

    def read(self, number: int, step: int, pairs: list[bytes]) -> Record | None:
        """Return the record of a line that has this layout, the keys in use only; None for any other line."""
        if len(pairs) != len(self.heads) or not all(map(bytes.startswith, pairs, self.heads)):
            return None
        try:
            if self.decimals is None:
                values = [
                    float(pairs[at][head:-1] if tail else pairs[at][head:]) for at, head, tail in self.known
                ]
            else:
                point = -1 - self.decimals
                texts = [pairs[at][head:-1] if tail else pairs[at][head:] for at, head, tail in self.known]
                if any(
                    text[point : point + 1] != b"." if b"." in text else b"e" in text.lower()
                    for text in texts
                ):
                    return None
                values = list(map(float, texts))
        except ValueError:
            return None
        return Record(number, step, dict(zip(self.keys, values, strict=True)), (), self.decimals)


def fast(pieces: Iterable[Piece]) -> Iterator[Record | Rejected]:
    """Yield what `records` yields, except that values of unused keys are not looked at in a line like the last."""
    layouts: dict[int, _Layout] = {}  # by their number of pairs
    expected = 0
    for piece in pieces:
        number, raw, whole = piece
        at = raw.find(NEEDLE)
        start = _START_BYTES.match(raw, at)
        pairs: list[bytes] = []
        if start is not None and whole and (at == 0 or raw[at - 1 : at] in b" \t"):
            pairs = raw[start.end() :].split(b" - ")
            layout = layouts.get(len(pairs))
            if layout is not None and (record := layout.read(number, int(start[1]), pairs)) is not None:
                expected = len(pairs)
                yield record
                continue
        found = list(parse(Line(number, clean(raw), whole), expected))
        if pairs and len(found) == 1 and isinstance(found[0], Record):
            layout = _Layout.of(pairs, found[0])
            if layout is not None:
                if len(layouts) >= _LAYOUTS:
                    layouts.clear()
                layouts[len(pairs)] = layout
        for item in found:
            if isinstance(item, Record):
                expected = len(item.data)
            yield item


def recognises(text: str) -> bool:
    """Whether a text holds a record of this format."""
    return "step:" in text and any(isinstance(item, Record) for item in parse(Line(0, text)))


@reader("verl-console", "verl console", recognises, VERL, needles=(NEEDLE,), fast=fast)
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; other text is passed over, only damaged metric lines are rejected."""
    pairs = 0
    for line in lines:
        if "step:" not in line.text:
            continue
        for item in parse(line, pairs):
            if isinstance(item, Record):
                pairs = len(item.data)
            yield item
