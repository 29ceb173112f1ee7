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
from array import array
from collections.abc import Iterable, Iterator

from diagnose.logs.model import Record, Rejected, Row
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
_GAP = b" - "
_ENDS = rb"(?= |$)"
_BEFORE = (b"", b" ", b"\t")
_LAYOUTS = 500
"""Layouts that are made for a log: a run has a handful (with validation, with a checkpoint, without), each made anew
where its values get much longer or shorter."""
_FULL = 64
_OF_NUMBERS = b"0123456789.+-()einfa"
_SLACK = 64


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


class _Layout:
    """The keys of a metric line in their order, as one pattern that finds the values in use.

    A line has the layout when what is left of it without the characters of numbers is the same (`outline`), and it has
    every key in use, in order and about where the lines before had it. Values of other keys are not looked at. The
    first and every `_FULL`th line is compared key by key, so that a line that was damaged inside a key founds nothing.

    Attributes:
        heads: For every pair what it starts with, the wrapper of its value included.
        known: Positions of the pairs in use.
        keys: Their keys.
        spans: For each, the smallest and largest number of bytes between it and the value in use before it.
        decimals: Decimals of all values, None where they differ.
        lines: Lines that were read, not counting the one that it was made from.
    """

    def __init__(
        self,
        heads: tuple[bytes, ...],
        known: tuple[int, ...],
        keys: tuple[str, ...],
        spans: tuple[tuple[int, int], ...],
        decimals: int | None,
    ) -> None:
        self.heads, self.known, self.keys, self.spans = heads, known, keys, spans
        self.decimals = decimals
        self.size = len(heads)
        self.lines = 0
        parts: list[bytes] = []
        before = -1
        for at, (least, most) in zip(known, spans, strict=True):
            gap = re.escape((_GAP if at else b"") + heads[at])
            if at == before + 1:  # nothing between them that could be longer or shorter
                parts.append(gap)
            else:  # atomic, so that no line takes more than linear time
                bounds = (max(0, least - _SLACK), most + _SLACK)
                parts.append((_ENDS if parts else b"") + b"(?>.{%d,%d}%s)" % (*bounds, gap))
            # One character that ends it is found far faster than one of three; `read` refuses what is no number.
            parts.append(rb"([^)]{1,40})\)" if heads[at].endswith(b"(") else rb"([^ ]{1,40})")
            before = at
        self.match = re.compile(b"".join(parts) + _ENDS, re.DOTALL).match
        self.point = -1 - decimals if decimals is not None else 0

    @staticmethod
    def of(body: bytes, record: Record, before: _Layout | None) -> _Layout | None:
        """Return the layout of a line that gave a complete record, None where it is too unusual for one.

        Args:
            body: The line from its first pair on.
            record: What it gave.
            before: The layout that it should have had.
        """
        pairs = body.split(_GAP)
        if len(pairs) != len(record.data):
            return None
        heads: list[bytes] = []
        known: list[int] = []
        keys: list[str] = []
        spans: list[tuple[int, int]] = []
        at = end = 0
        for position, (pair, key) in enumerate(zip(pairs, record.data, strict=True)):
            name, colon, value = pair.partition(b":")
            if not colon or name.decode("utf-8", "replace") != key:
                return None
            wrapper, bracket, rest = value.partition(b"(")
            if bracket and not (rest.endswith(b")") and b"," not in rest):
                return None
            heads.append(name + colon + (wrapper + bracket if bracket else b""))
            if VERL.offer(key) is not None:
                known.append(position)
                keys.append(key)
                span = max(0, at - len(_GAP) - end) if position else 0
                spans.append((span, span))
                end = at + len(pair)
            at += len(pair) + len(_GAP)
        if not known:
            return None
        if before is not None and before.heads == tuple(heads):
            spans = [
                (min(one[0], two[0]), max(one[1], two[1]))
                for one, two in zip(spans, before.spans, strict=True)
            ]
        return _Layout(tuple(heads), tuple(known), tuple(keys), tuple(spans), record.decimals)

    def read(self, number: int, step: int, raw: bytes, start: int) -> Record | None:
        """Return the record of a line that has this layout, the keys in use only; None for any other line.

        Args:
            number: Number of the line.
            step: Its step.
            raw: The line.
            start: Where its first pair begins.
        """
        if self.lines % _FULL == 0:
            pairs = raw[start:].split(_GAP)
            if len(pairs) != len(self.heads) or not all(map(bytes.startswith, pairs, self.heads)):
                return None
        found = self.match(raw, start)
        if found is None:
            return None
        self.lines += 1
        texts = found.groups()
        if (point := self.point) and any(
            text[point : point + 1] != b"." if b"." in text else b"e" in text.lower() for text in texts
        ):
            return None
        try:
            row = Row(self.keys, array("d", map(float, texts)))
            return Record(number, step, row, (), self.decimals)
        except ValueError:
            return None


def fast(pieces: Iterable[Piece]) -> Iterator[Record | Rejected]:
    """Yield what `records` yields, except that values of unused keys are not looked at in a line like the last."""
    layouts: dict[bytes, _Layout] = {}  # by their outlines
    known, starts = layouts.get, _START_BYTES.match
    made = expected = 0
    for number, raw, whole in pieces:
        start = starts(raw, raw.find(NEEDLE))
        layout = None
        outline = b""
        if start is not None and whole:
            begin, end = start.span()
            if raw[begin - 1 : begin] in _BEFORE:
                outline = raw[end:].translate(None, _OF_NUMBERS)
                layout = known(outline)
                if layout is not None:
                    record = layout.read(number, int(start[1]), raw, end)
                    if record is not None:
                        expected = layout.size
                        yield record
                        continue
        found = list(parse(Line(number, clean(raw), whole), expected))
        if (
            outline
            and start is not None
            and made < _LAYOUTS
            and len(found) == 1
            and isinstance(found[0], Record)
        ):
            new = _Layout.of(raw[start.end() :], found[0], layout)
            if new is not None and (layout is None or not layout.lines or layout.heads == new.heads):
                made += 1
                layouts[outline] = new
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
