"""TensorBoard event files: TFRecords of `Event` messages, read without TensorBoard.

A record is its length (uint64), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data:
https://www.tensorflow.org/tutorials/load_data/tfrecord . Field numbers are those of event.proto, summary.proto and
tensor.proto. Scalars are read, written as `simple_value` or as a tensor of one element; histograms, images, texts and
graphs are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from diagnose.logs import protobuf, values
from diagnose.logs.model import Record, Rejected
from diagnose.logs.names import EVERY
from diagnose.logs.protobuf import Broken
from diagnose.logs.registry import file_reader
from diagnose.logs.text import key_name

MAX_EVENT = 1 << 20
"""Largest event that is looked into, in bytes; one with a thousand scalars has a tenth of that."""
_STEP, _SUMMARY = 2, 5
_VALUE, _TAG, _SIMPLE, _TENSOR = 1, 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FLOAT, _DOUBLE, _INT32, _INT64 = 1, 2, 3, 9
_FORMATS = {_FLOAT: "<f", _DOUBLE: "<d", _INT32: "<i", _INT64: "<q"}


def _table() -> tuple[int, ...]:
    """Return CRC-32C's table: polynomial 0x1EDC6F41, reflected."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C that a TFRecord has: the sum rotated right by 15 bits, plus a constant."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def recognises(head: bytes) -> bool:
    """Whether a file begins with the event that names the version of the format."""
    return b"brain.Event:" in head[:128]


@file_reader("tensorboard", "TensorBoard event file", recognises, EVERY, grows=True)
def records(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield a record an event with scalars; events with a wrong checksum are rejected."""
    number = 0
    while head := stream.read(12):
        number += 1
        if len(head) < 12:
            yield Rejected(number, "cut off at the end of the file")
            return
        size, checksum = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != checksum:
            yield Rejected(number, "wrong checksum of the length: nothing after it can be read")
            return
        if size > MAX_EVENT:
            if not _skip(stream, size + 4):
                yield Rejected(number, "cut off at the end of the file")
                return
            continue
        data, tail = stream.read(size), stream.read(4)
        if len(data) < size or len(tail) < 4:
            yield Rejected(number, "cut off at the end of the file")
            return
        if masked_crc(data) != struct.unpack("<I", tail)[0]:
            yield Rejected(number, "wrong checksum")
            continue
        try:
            step, scalars = _event(data)
        except Broken as error:
            yield Rejected(number, f"no event: {error}")
            continue
        if scalars and 0 <= step <= values.MAX_STEP:
            yield Record(number, step, scalars)
        elif scalars:
            yield Rejected(number, f"step is no whole number ≥ 0: {step}")


def _skip(stream: BinaryIO, size: int) -> bool:
    """Pass over so many bytes, False where the file ends before."""
    while size > 0:
        chunk = stream.read(min(size, MAX_EVENT))
        if not chunk:
            return False
        size -= len(chunk)
    return True


def _event(data: bytes) -> tuple[int, dict[str, float]]:
    """Return step and scalars of an event."""
    step, scalars = 0, dict[str, float]()
    for number, _, value in protobuf.fields(data):
        if number == _STEP:
            step = protobuf.signed(value)
        elif number == _SUMMARY:
            for inner, _, summary in protobuf.fields(protobuf.raw(value)):
                if inner == _VALUE and len(scalars) < values.MAX_KEYS:
                    tag, scalar = _scalar(protobuf.raw(summary))
                    if tag and scalar is not None:
                        scalars[key_name(tag)] = scalar
    return step, scalars


def _scalar(data: bytes) -> tuple[str, float | None]:
    """Return tag and value of a summary value, None for a value of another kind."""
    tag, scalar = "", None
    for number, kind, value in protobuf.fields(data):
        if number == _TAG:
            tag = protobuf.text(value)
        elif number == _SIMPLE:
            (scalar,) = protobuf.floats(value, kind)[:1] or (None,)
        elif number == _TENSOR:
            scalar = _single(protobuf.raw(value))
    return tag, scalar


def _single(data: bytes) -> float | None:
    """Return the number in a tensor of one element, None for any other tensor."""
    dtype, found = 0, list[float]()
    content = b""
    for number, kind, value in protobuf.fields(data):
        if number == _DTYPE:
            dtype = protobuf.signed(value)
        elif number == _CONTENT:
            content = protobuf.raw(value)
        elif number == _FLOATS:
            found += protobuf.floats(value, kind)
        elif number == _DOUBLES:
            found += protobuf.floats(value, kind, double=True)
    if content and dtype in _FORMATS:
        if len(content) != struct.calcsize(_FORMATS[dtype]):
            return None
        return float(struct.unpack(_FORMATS[dtype], content)[0])
    return found[0] if len(found) == 1 else None
