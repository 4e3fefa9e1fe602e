"""Protobuf's wire format, a field after the other, for those who read a few without a tree of objects."""

from __future__ import annotations

from typing import Final

# Wire types: the lower three bits of a tag; the others are the number of the field.
NUMBER: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5


def field(data: bytes, position: int, end: int) -> tuple[int, int, int]:
    """The field at `position` of a message that goes to `end`: its tag; its number, or where its bytes begin;
    where the next field begins. Raises ValueError, or IndexError beyond `data`, when there is none."""
    tag = data[position]
    position += 1
    if tag >= 0x80:
        tag, position = _varint(data, position - 1, end)
    if not 0 < tag >> 3 < 1 << 29:
        raise ValueError(f"field {tag >> 3}")
    kind = tag & 7
    if kind == BYTES:
        size = data[position]
        position += 1
        if size >= 0x80:
            size, position = _varint(data, position - 1, end)
        start = position
        position += size
    elif kind == NUMBER:
        start, position = _varint(data, position, end)
    elif kind == FIXED64:
        start = position
        position += 8
    elif kind == FIXED32:
        start = position
        position += 4
    else:
        raise ValueError(f"wire type {kind}")
    if position > end:
        raise ValueError("it is cut off")
    return tag, start, position


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at `position`, and where the next thing begins."""
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number is cut off or too long")
