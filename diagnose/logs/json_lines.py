"""JSON lines, one flat record a line: ms-swift's ``logging.jsonl``, W&B and MLflow dumps, scripts of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import EVERY
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, printable

_INNER = ("metrics", "data", "logs", "values")
"""Where some put the metrics of a record."""
_CLOCK = (*values.STEP_KEYS, values.OF_STEPS)


def record_of(raw: Mapping[str, Any], number: int, last: int) -> Record | Rejected:
    """Return the record of one flat JSON object, or why it is none.

    Args:
        raw: The object.
        number: Its line or entry.
        last: Step of the record before, for an object without a step.
    """
    for name in _INNER:
        if isinstance(inner := raw.get(name), Mapping):
            raw = {**{key: value for key, value in raw.items() if key != name}, **inner}
    step = values.step_of(raw)
    data, others = values.split(item for item in values.flat(raw) if item[0] not in _CLOCK)
    if step is None:
        if sum(EVERY.offer(key) is not None for key in data) < 2:
            return Rejected(number, "no step and no known metric: a configuration record?")
        step = last + 1
    return Record(number, step, data, others)


def recognises(text: str) -> bool:
    """Whether a text is a line of this format, and not verl's."""
    if not text.startswith("{") or not text.endswith("}"):
        return False
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(raw, dict) or ("step" in raw and isinstance(raw.get("data"), dict)):
        return False
    found = record_of(raw, 0, 0)
    return isinstance(found, Record) and any(EVERY.offer(key) is not None for key in found.data)


@reader("json-lines", "JSON lines (ms-swift logging.jsonl and others)", recognises, EVERY, hints=(b'{"',))
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; every other line is rejected. Records without a step are counted on."""
    last = 0
    for line in lines:
        text = line.text.removeprefix("> ")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            reason = f"not JSON: {printable(text, 40)!r}" if line.whole else "cut off at the end of the file"
            yield Rejected(line.number, reason)
            continue
        if not isinstance(raw, dict):
            yield Rejected(line.number, "no JSON object")
            continue
        found = record_of(raw, line.number, last)
        if isinstance(found, Record):
            last = found.step
        yield found
