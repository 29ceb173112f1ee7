"""MindSpeed-RL: ``iteration: 3 / 100 | grpo/rewards/mean : 0.2500 | …``; Megatron's training lines are cousins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from diagnose.logs import values
from diagnose.logs.canonical import merged
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import MEGATRON, MINDSPEED_RL, VERL
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, key_name, printable

ALIASES = merged((MINDSPEED_RL, VERL, MEGATRON))
_START = re.compile(r"\biteration:?\s{0,12}(\d{1,12})\s{0,12}/\s{0,12}\d{1,12}\s{0,4}\|")
_PAIR = re.compile(
    rf"(?P<key>[^:|]{{1,200}}?)\s{{0,4}}:\s{{0,4}}(?:(?P<plain>{values.NUMBER})|{values.WRAPPED})",
    re.IGNORECASE,
)


def recognises(text: str) -> bool:
    """Whether a text is a metric line of this format."""
    return "iteration" in text and any(isinstance(item, Record) for item in _parse(Line(0, text)))


def _parse(line: Line) -> Iterator[Record | Rejected]:
    start = _START.search(line.text)
    if start is None:
        return
    body = line.text[start.end() :]
    pieces = [piece.strip() for piece in body.split("|")[: values.MAX_KEYS] if piece.strip()]
    if not line.whole and not body.rstrip().endswith("|") and pieces:
        pieces.pop()
        yield Rejected(line.number, f"cut off after {len(pieces)} values")
    texts: dict[str, str] = {}
    bad: list[str] = []
    for piece in pieces:
        if pair := _PAIR.fullmatch(piece):
            texts[key_name(pair["key"].strip())] = pair["plain"] or pair["wrapped"]
        else:
            bad.append(piece)
    if not any(ALIASES.offer(key) for key in texts):
        return
    decimals = {
        len(text.partition(".")[2]) for text in texts.values() if "." in text and "e" not in text.lower()
    }
    exact = any("e" in text.lower() and text[-1].isdigit() for text in texts.values())
    yield Record(
        line.number,
        int(start[1]),
        {key: float(text) for key, text in texts.items()},
        decimals=decimals.pop() if len(decimals) == 1 and not exact else None,
    )
    if bad:
        yield Rejected(
            line.number, f"{len(bad)} of {len(pieces)} values unreadable, such as {printable(bad[0], 40)!r}"
        )


@reader("mindspeed-rl", "MindSpeed-RL or Megatron console", recognises, ALIASES, needles=(b"iteration",))
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; other text is passed over, only damaged metric lines are rejected."""
    for line in lines:
        yield from _parse(line)
