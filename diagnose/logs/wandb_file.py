"""W&B offline runs (``run-<id>.wandb``): a LevelDB-style log of `Record` messages, read without wandb.

After a header of 7 bytes come blocks of 32 KiB (the first is short by the header); a block has records of CRC-32,
length (uint16), type (whole, first, middle or last part of a message) and data. The checksum is zlib's over type and
data, not LevelDB's CRC-32C. Field numbers are those of wandb_internal.proto.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from diagnose.logs import protobuf, values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import EVERY
from diagnose.logs.protobuf import Broken
from diagnose.logs.registry import file_reader
from diagnose.logs.text import key_name

BLOCK = 1 << 15
MAX_MESSAGE = 1 << 24
"""Largest message that is put together, in bytes: a log call of some thousand metrics has a hundredth of that."""
_IDENT = b":W&B"
_HEADER = 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEEDS = {kind: zlib.crc32(bytes([kind])) for kind in (_WHOLE, _FIRST, _MIDDLE, _LAST)}
_HISTORY = 2
_ITEM, _STEP, _STEP_NUMBER = 1, 2, 1
_KEY, _NESTED_KEY, _VALUE_JSON = 1, 2, 16


def recognises(head: bytes) -> bool:
    """Whether a file begins with the header of such a log."""
    return head.startswith(_IDENT)


@file_reader("wandb", "W&B offline run (.wandb)", recognises, EVERY, grows=True)
def records(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield a record a log call; parts with a wrong checksum are rejected and reading goes on in the next block."""
    last = -1
    for number, message in _messages(stream):
        if isinstance(message, str):
            yield Rejected(number, message)
            continue
        try:
            entries = _history(message)
        except Broken as error:
            yield Rejected(number, f"no record: {error}")
            continue
        if entries is None:
            continue
        data, others = values.split(entries.items())
        step = values.step_of(data)
        if step is None:
            step = last + 1
        last = step
        yield Record(number, step, data, others)


def _messages(stream: BinaryIO) -> Iterator[tuple[int, bytes | str]]:
    """Yield (number, message), or a number and what is wrong."""
    at = len(stream.read(_HEADER))
    number, parts, size = 0, list[bytes](), 0
    while True:
        left = BLOCK - at % BLOCK
        if left < _HEADER:  # padding
            padding = stream.read(left)
            at += len(padding)
            if not padding:
                break
            continue
        head = stream.read(_HEADER)
        if not head:
            break
        at += len(head)
        if len(head) < _HEADER:
            yield number + 1, "cut off at the end of the file"
            return
        checksum, length, kind = struct.unpack("<IHB", head)
        if kind == 0 and length == 0 and checksum == 0:  # zeros that a file system left after a crash
            at += len(stream.read(-at % BLOCK))
            continue
        room = -at % BLOCK
        wrong = kind not in _SEEDS or length > room
        data = b"" if wrong else stream.read(length)
        at += len(data)
        if not wrong and len(data) < length:
            yield number + 1, "cut off at the end of the file"
            return
        if wrong or zlib.crc32(data, _SEEDS[kind]) != checksum:
            number += 1
            yield number, "wrong checksum: the rest of its block is passed over"
            parts, size = [], 0
            at += len(stream.read(-at % BLOCK))
            continue
        if kind in (_WHOLE, _FIRST):
            number += 1
            parts, size = [], 0
        elif not parts:
            continue  # the first part was lost
        size += length
        if size > MAX_MESSAGE:
            yield number, f"longer than {MAX_MESSAGE >> 20} MiB"
            parts = []
            continue
        parts.append(data)
        if kind in (_WHOLE, _LAST):
            yield number, b"".join(parts)
            parts = []


def _history(message: bytes) -> dict[str, Any] | None:
    """Return key → value of a log call, None for a message of another kind."""
    for number, _, value in protobuf.fields(message):
        if number != _HISTORY:
            continue
        entries: dict[str, Any] = {}
        step: int | None = None
        for inner, _, item in protobuf.fields(protobuf.raw(value)):
            if inner == _ITEM and len(entries) < values.MAX_KEYS:
                key, entry = _item(protobuf.raw(item))
                entries[key_name(key)] = entry
            elif inner == _STEP:
                for name, _, counted in protobuf.fields(protobuf.raw(item)):
                    if name == _STEP_NUMBER:
                        step = protobuf.signed(counted)
        if step is not None:
            entries.setdefault("_step", step)
        return entries
    return None


def _item(data: bytes) -> tuple[str, Any]:
    """Return key and value of an item."""
    key, nested, value = "", list[str](), None
    for number, _, content in protobuf.fields(data):
        if number == _KEY:
            key = protobuf.text(content)
        elif number == _NESTED_KEY:
            nested.append(protobuf.text(content))
        elif number == _VALUE_JSON:
            try:
                value = json.loads(protobuf.raw(content))
            except (ValueError, RecursionError):
                value = ""
    return key or "/".join(nested), value
