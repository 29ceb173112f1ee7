"""verl's console: ``step:N - key:value - key:value …`` amid the output of everybody else.

In the wild the line is coloured, prefixed by Ray (``(TaskRunner pid=7)``, two generations of prefixes),
quoted, glued to a progress bar, and cut off at the end; values come as ``0.5``, ``nan``, ``np.float64(0.5)``,
``np.int32(2)``. Colours, control characters and carriage returns are gone when the text gets here
(`diagnose.logs.text`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from diagnose.logs import canonical
from diagnose.logs.model import Record, Rejected
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, key_name, printable

# "training/global_step:5" is a pair, not the beginning of a record.
_START = re.compile(r"(?<![\w/])step:(\d{1,12}) - ")
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


def recognises(text: str) -> bool:
    """Whether a text holds a record of this format."""
    return "step:" in text and any(isinstance(item, Record) for item in parse(Line(0, text)))


@reader("verl-console", "verl console", recognises, canonical.VERL)
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
