"""OpenRLHF and slime: a dict with its step before it, ``Global step 5: {…}``, ``rollout 5: {…}``, ``step 5: {…}``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import OPENRLHF, SLIME
from diagnose.logs.registry import reader
from diagnose.logs.text import Line

_OPENRLHF = re.compile(r"\bGlobal step (\d{1,12}):\s{0,3}(?=\{)")
_SLIME = re.compile(r"(?<![\w/] )\b(step|rollout|perf|eval) (\d{1,12}):\s{0,3}(?=\{)")


def _record(line: Line, step: int, body: str) -> Iterator[Record | Rejected]:
    pairs = values.dict_pairs(body)
    data, others = values.split(pairs.items())
    if not data:
        yield Rejected(line.number, f"step {step} without a readable metric")
        return
    yield Record(line.number, step, data, others)
    if "}" not in body:
        yield Rejected(line.number, f"cut off after {len(data)} values")


def is_openrlhf(text: str) -> bool:
    """Whether a text holds a record of OpenRLHF."""
    return "Global step " in text and _OPENRLHF.search(text) is not None


@reader("openrlhf", "OpenRLHF console", is_openrlhf, OPENRLHF, needles=(b"Global step ",))
def openrlhf(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; other text is passed over."""
    for line in lines:
        if found := _OPENRLHF.search(line.text):
            yield from _record(line, int(found[1]), line.text[found.end() :])


def is_slime(text: str) -> bool:
    """Whether a text holds a record of slime."""
    found = _SLIME.search(text) if ": {" in text else None
    return found is not None and any(SLIME.offer(key) for key in values.dict_pairs(text[found.end() :]))


@reader("slime", "slime console", is_slime, SLIME, needles=(b": {",))
def slime(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; other text is passed over.

    ``step`` counts updates, the others rollouts, of which each may bring several updates. A rollout is logged before
    its updates, so its record waits for the first of them and takes its step; what is logged of it later takes the
    step of the last. Without any (a run that logs no updates) rollouts keep their own numbers.
    """
    waiting: list[tuple[int, Record]] = []
    last = present = -1
    for line in lines:
        found = _SLIME.search(line.text) if ": {" in line.text else None
        if found is None:
            continue
        kind, number = found[1], int(found[2])
        for item in _record(line, number, line.text[found.end() :]):
            if isinstance(item, Rejected):
                yield item
            elif kind == "step":
                yield from (record._replace(step=number) for _, record in waiting)
                present = waiting[-1][0] if waiting else present
                waiting, last = [], number
                yield item
            elif last >= 0 and (kind == "eval" or number == present):
                yield item._replace(step=last)
            else:
                if waiting and waiting[0][0] != number:
                    yield from (record for _, record in waiting)
                    waiting = []
                waiting.append((number, item))
    yield from (record if last < 0 else record._replace(step=last + 1) for _, record in waiting)
