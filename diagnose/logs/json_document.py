"""Files that are one JSON document: transformers' ``trainer_state.json`` and Megatron's golden values.

Entries are decoded one after the other, so that a file that was cut off gives what is before the cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from diagnose.errors import LogError
from diagnose.logs import values
from diagnose.logs.json_lines import record_of
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import MEGATRON, TRL
from diagnose.logs.registry import file_reader
from diagnose.logs.text import key_name

MAX_DOCUMENT = 1 << 28
"""Largest document, in bytes; a trainer_state.json of a hundred thousand log calls has a tenth of that."""

_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[\s,]{0,1000}")
_GOLDEN = re.compile(rb'\s*\{\s*"[^"]{1,200}"\s*:\s*\{\s*"(?:start_step|end_step|step_interval|values)"')


def _text(stream: BinaryIO) -> str:
    data = stream.read(MAX_DOCUMENT + 1)
    if len(data) > MAX_DOCUMENT:
        raise LogError(
            f"this JSON document is larger than {MAX_DOCUMENT >> 20} MiB", "give the log as JSON lines"
        )
    return data.decode("utf-8-sig", "replace")


def is_trainer_state(head: bytes) -> bool:
    """Whether a file begins like a trainer_state.json."""
    return (
        head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
        and b'"log_history"' in head
        and b'"global_step"' in head
    )


@file_reader("trainer-state", "trainer_state.json of transformers", is_trainer_state, TRL)
def trainer_state(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield the entries of the log history."""
    text = _text(stream)
    start = re.search(r'"log_history"\s{0,20}:\s{0,20}\[', text)
    if start is None:
        return
    at, entry, last = start.end(), 0, 0
    while True:
        blanks = _BLANKS.match(text, at)
        at = blanks.end() if blanks else at
        if text.startswith("]", at):
            return
        entry += 1
        try:
            raw, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield Rejected(entry, "cut off, or not JSON, from this entry on")
            return
        if not isinstance(raw, dict):
            yield Rejected(entry, "no JSON object")
        elif "train_runtime" not in raw:  # the summary at the end of a run is no step of it
            found = record_of(raw, entry, last)
            last = found.step if isinstance(found, Record) else last
            yield found


def is_golden(head: bytes) -> bool:
    """Whether a file begins like golden values."""
    return _GOLDEN.match(head) is not None


@file_reader("golden-values", "golden values of Megatron-LM", is_golden, MEGATRON)
def golden_values(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield a record a step: values come by metric, under "step": value or as a list with start and interval."""
    text = _text(stream)
    by_step: dict[int, dict[str, float]] = {}
    at, metric = text.find("{") + 1, 0
    while (begin := text.find('"', at)) >= 0:
        metric += 1
        try:
            key, at = _DECODER.raw_decode(text, begin)
            at = text.index(":", at) + 1
            blanks = _BLANKS.match(text, at)
            body, at = _DECODER.raw_decode(text, blanks.end() if blanks else at)
        except (ValueError, RecursionError):
            yield Rejected(metric, "cut off, or not JSON, from this metric on")
            break
        bad = 0
        for step, value in _points(body):
            if step is None or value is None:
                bad += 1
            else:
                by_step.setdefault(step, {})[key_name(str(key))] = value
        if bad:
            yield Rejected(metric, f"{bad} values without a whole step or a number")
    for entry, step in enumerate(sorted(by_step), 1):
        yield Record(entry, step, by_step[step])


def _points(body: Any) -> Iterator[tuple[int | None, float | None]]:
    """Yield (step, value) of one metric."""
    found = body.get("values") if isinstance(body, dict) else None
    if isinstance(found, dict):
        for step, value in found.items():
            yield values.step_of({"step": step}), values.number(value)
    elif isinstance(found, list):
        start = values.step(body.get("start_step", 0))
        stride = values.step(body.get("step_interval", 1))
        for index, value in enumerate(found):
            yield (None if start is None or not stride else start + index * stride), values.number(value)
