"""NeMo-RL: blocks of ``• Generation KL Error: 0.0007`` under a ``===== Step 3/100 =====``, or under nothing.

Blocks of a log without the headings are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from diagnose.logs import values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import NEMO_RL
from diagnose.logs.registry import reader
from diagnose.logs.text import Line, key_name

_STEP = re.compile(r"={5,40} Step (\d{1,12})/\d{1,12} ={5,40}")
_TRAINING, _VALIDATION = "Training Results:", "Validation Results:"
_BULLET = re.compile(
    rf"[•*]\s{{0,4}}(?P<key>[A-Za-z_][^:•]{{0,80}}):\s{{1,4}}(?P<value>{values.NUMBER})(?=[\s%]|s\b|$)",
    re.IGNORECASE,
)


def recognises(text: str) -> bool:
    """Whether a text is a metric line of this format."""
    return "•" in text and any(found["key"] in NEMO_RL.names for found in _BULLET.finditer(text))


@reader("nemo-rl", "NeMo-RL console", recognises, NEMO_RL, hints=("•".encode(),))
def records(lines: Iterable[Line]) -> Iterator[Record | Rejected]:
    """Yield a record a block, when the next one begins; other text is passed over."""
    step, headed, begun, prefix = 0, False, 0, ""
    data: dict[str, float] = {}
    for line in lines:
        text = line.text
        heading = _STEP.search(text) if "== Step " in text else None
        new = _TRAINING in text or _VALIDATION in text
        if (heading or new) and data:
            yield Record(begun, step, data)
            data = {}
        if heading:
            step, headed, prefix = int(heading[1]), True, ""
        elif new:
            prefix = "Validation/" if _VALIDATION in text else ""
            step += not headed and not prefix
        if "•" in text or text.startswith("*"):
            for found in _BULLET.finditer(text):
                if not data:
                    begun = line.number
                if len(data) < values.MAX_KEYS:
                    data[key_name(prefix + found["key"])] = float(found["value"])
    if data:
        yield Record(begun, step, data)
