"""verl's file logger: JSON lines ``{"step": N, "data": {key: number}}``; it writes NaN and infinity as null.

Also the format of our own engines' ``metrics.jsonl`` and of the curves kept in a run folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from diagnose.logs import canonical
from diagnose.logs.model import Record, Rejected
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, key_name, printable

MAX_STEP = 10**12
"""Largest step taken for one; steps must also be exact as float64."""


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
    step = _step(raw["step"])
    if step is None:
        return Rejected(line.number, f"step is no whole number ≥ 0: {printable(repr(raw['step']), 40)}")
    values = {key_name(key): number(value) for key, value in raw["data"].items()}
    return Record(
        line.number,
        step,
        {key: value for key, value in values.items() if value is not None},
        tuple(key for key, value in values.items() if value is None),
    )


def _step(raw: Any) -> int | None:
    """Return a step, None where the value is none."""
    if (
        isinstance(raw, bool)
        or not isinstance(raw, int | float)
        or not 0 <= raw <= MAX_STEP
        or raw != int(raw)
    ):
        return None
    return int(raw)


def number(raw: Any) -> float | None:
    """Return a JSON value as a number: NaN for null and for a quoted "nan", None for what is no number."""
    if raw is None:
        return math.nan
    if isinstance(raw, str):
        if raw.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
            return None
        return float(raw)
    if isinstance(raw, bool | int | float):
        try:
            return float(raw)
        except OverflowError:
            return math.inf
    return None


def recognises(text: str) -> bool:
    """Whether a text is a line of this format."""
    if not text.startswith("{") or '"step"' not in text or '"data"' not in text:
        return False
    return isinstance(parse(Line(0, text)), Record)


@reader("verl-file", "verl file logger (JSON lines)", recognises, canonical.VERL)
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; every other line is rejected."""
    for line in lines:
        yield parse(line)
