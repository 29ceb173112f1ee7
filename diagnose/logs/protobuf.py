"""The protobuf wire format, as far as two log formats need it: fields of a message, without a schema.

https://protobuf.dev/programming-guides/encoding/ . Linear in the message; whatever is malformed raises `Broken`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Broken(ValueError):
    """A message that is none."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned varint and the position after it."""
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise Broken("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise Broken("a number has too many bytes")


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield (field number, wire type, value) of a message; the value of a BYTES or FIXED field is bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise Broken(f"wire type {kind}")
        if size > len(data) - at:
            raise Broken("a field is longer than its message")
        yield number, kind, data[at : at + size]
        at += size


def signed(value: int | bytes) -> int:
    """Return an int64 field's value."""
    if isinstance(value, bytes):
        raise Broken("a number was expected")
    return value - (1 << 64) if value >> 63 else value


def raw(value: int | bytes) -> bytes:
    """Return the value of a field of bytes."""
    if isinstance(value, int):
        raise Broken("bytes were expected")
    return value


def text(value: int | bytes) -> str:
    """Return a string field's value."""
    return raw(value).decode("utf-8", "replace")


def floats(value: int | bytes, kind: int, double: bool = False) -> tuple[float, ...]:
    """Return the numbers of a float or double field, packed or not."""
    data = raw(value)
    size = 8 if double else 4
    if kind not in (BYTES, FIXED64, FIXED32) or len(data) % size:
        raise Broken("numbers of another size were expected")
    return struct.unpack(f"<{len(data) // size}{'d' if double else 'f'}", data)
