"""verl's file logger: JSON lines ``{"step": N, "data": {key: number}}``; it writes NaN and infinity as null.

Also the format of our own engines' ``metrics.jsonl`` and of the curves kept in a run folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import VERL
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, key_name, printable


def parse(line: Line) -> Record | Rejected:
    """Return the record of one line, or why it is none."""
    try:
        raw = json.loads(line.text)
    except (ValueError, RecursionError):  # ValueError also covers integers of thousands of digits
        if not line.whole:
            return Rejected(line.number, "cut off at the end of the file")
        return Rejected(line.number, f"not JSON: {printable(line.text, 40)!r}")
    if not isinstance(raw, dict) or "step" not in raw or not isinstance(raw.get("data"), dict):
        return Rejected(line.number, 'no object with "step" and "data"')
    step = values.step(raw["step"])
    if step is None:
        return Rejected(line.number, f"step is no whole number ≥ 0: {printable(repr(raw['step']), 40)}")
    found = {key_name(key): values.number(value) for key, value in raw["data"].items()}
    return Record(
        line.number,
        step,
        {key: value for key, value in found.items() if value is not None},
        tuple(key for key, value in found.items() if value is None),
    )


def recognises(text: str) -> bool:
    """Whether a text is a line of this format."""
    if not text.startswith("{") or '"step"' not in text or '"data"' not in text:
        return False
    return isinstance(parse(Line(0, text)), Record)


@reader("verl-file", "verl file logger (JSON lines)", recognises, VERL, hints=(b'"data"',))
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; every other line is rejected."""
    for line in lines:
        yield parse(line)
