"""prime-rl: ``Step 7 | Time: 3.2s | Loss: 0.01 | … | Mismatch KL: 0.0009``, from trainer and orchestrator.

Newer versions print neither the colons nor the name of the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import PRIME_RL
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, key_name

_START = re.compile(r"(?<!Micro )\bStep (\d{1,12})\s{1,3}\|")
_PAIR = re.compile(
    rf"(?P<key>[A-Z][A-Za-z@. /-]{{0,40}}?):?\s{{1,4}}(?P<value>{values.NUMBER})(?P<unit>\s?%|[^\s|]{{0,20}})(?=\s|$)",
    re.IGNORECASE,
)


def _pairs(body: str) -> dict[str, float]:
    """Return the named numbers; percentages become shares."""
    found: dict[str, float] = {}
    for piece in body.split("|")[: values.MAX_KEYS]:
        if pair := _PAIR.match(piece.strip()):
            scale = 0.01 if pair["unit"].strip() == "%" else 1.0
            found[key_name(pair["key"])] = float(pair["value"]) * scale
    if "Reward" in found and "Loss" not in found and "Time" in found:
        found["Orchestrator Time"] = found.pop("Time")  # both processes time a step of their own
    return found


def recognises(text: str) -> bool:
    """Whether a text is a metric line of this format."""
    start = _START.search(text) if "Step " in text else None
    return start is not None and sum(key in PRIME_RL.names for key in _pairs(text[start.end() :])) >= 2


@reader("prime-rl", "prime-rl console", recognises, PRIME_RL, needles=(b"Step ",))
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield the records; other text is passed over."""
    for line in lines:
        if start := _START.search(line.text):
            body = line.text[start.end() :]
            if data := _pairs(body):
                if not line.whole and len(data) > 1:
                    data.popitem()
                    yield Rejected(line.number, f"cut off after {len(data)} values")
                yield Record(line.number, int(start[1]), data)
