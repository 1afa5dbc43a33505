"""Scalars in the event files of TensorBoard.

A file is a row of records: the length of the data (8 bytes), its checksum, the data and their
checksum (4 bytes each; CRC-32C, masked). The data are an `Event` of TensorFlow's protocol buffers
(tensorflow/core/util/event.proto), of which the step and the summaries of one float are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ray_workers.node.found_metrics.points import MAX_STEP, FoundPoint, is_key

MAX_RECORD_BYTES = 1 << 20
"""Longer records hold images, sounds and graphs, and are passed over."""
HEADER_BYTES = 12
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_FLOAT, _DOUBLE = 1, 2  # of `DataType`
_FORMATS = {_FLOAT: "<f", _DOUBLE: "<d"}

# The fields that are read, by their numbers.
_EVENT_STEP, _EVENT_SUMMARY = 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_TYPE, _TENSOR_SHAPE, _TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES = 1, 2, 4, 5, 6
_SHAPE_DIM, _DIM_SIZE = 2, 1


class Damaged(ValueError):
    """The bytes are not those of an event file, from here on."""


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset of its end, data) of each whole record; the data of a long one are empty.

    A record whose end is beyond `data` comes only if it is long, so that its end can be waited
    for. Damaged where the checksum of a length is wrong."""
    at = 0
    while len(data) - at >= HEADER_BYTES:
        head = data[at : at + 8]
        (length,) = _LENGTH.unpack(head)
        if _CHECKSUM.unpack_from(data, at + 8)[0] != masked_crc32c(head):
            raise Damaged(f"a record's length is damaged at byte {at}")
        end = at + HEADER_BYTES + length + 4
        if length > MAX_RECORD_BYTES:
            yield end, b""
        elif end > len(data):
            return
        else:
            yield end, data[at + HEADER_BYTES : end - 4]
        at = end


def scalars(event: bytes) -> list[FoundPoint]:
    """The scalars of one event, under their tags. Damaged if it is none."""
    step, found = 0, []
    for number, value in _fields(event):
        if number == _EVENT_STEP and isinstance(value, int):
            step = value
        elif number == _EVENT_SUMMARY and isinstance(value, bytes):
            for inner, one in _fields(value):
                if inner == _SUMMARY_VALUE and isinstance(one, bytes):
                    found.append(_tagged(one))
    if step > MAX_STEP:  # also a negative one
        return []
    return [
        FoundPoint(tag, step, number)
        for tag, number in found
        if number is not None and is_key(tag) and not tag.startswith("_hparams_")
    ]


def _tagged(summary: bytes) -> tuple[str, float | None]:
    tag, number = "", None
    for field, value in _fields(summary):
        if field == _VALUE_TAG and isinstance(value, bytes):
            tag = value.decode(errors="replace")
        elif field == _VALUE_SIMPLE and isinstance(value, bytes) and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == _VALUE_TENSOR and isinstance(value, bytes):
            number = _one_number(value)
    return tag, number


def _one_number(tensor: bytes) -> float | None:
    """The number of a tensor of one float or double; None for any other."""
    kind, content, size = 0, b"", 1
    for field, value in _fields(tensor):
        if field == _TENSOR_TYPE and isinstance(value, int):
            kind = value
        elif field == _TENSOR_SHAPE and isinstance(value, bytes):
            size = _size(value)
        elif field in (_TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES) and value:
            content = value if isinstance(value, bytes) else b""
    form = _FORMATS.get(kind)
    if form is None or size != 1 or len(content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, content)[0])


def _size(shape: bytes) -> int:
    size = 1
    for field, dim in _fields(shape):
        if field == _SHAPE_DIM and isinstance(dim, bytes):
            sizes = [value for inner, value in _fields(dim) if inner == _DIM_SIZE]
            size *= sizes[-1] if sizes and isinstance(sizes[-1], int) else 0
    return size


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: an int, or the bytes of anything else. Damaged if it is no
    message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
                continue
            case 1:
                length = 8
            case 2:
                length, at = _varint(message, at)
            case 5:
                length = 4
            case other:
                raise Damaged(f"a field has the wire type {other}")
        if at + length > len(message):
            raise Damaged("a field ends beyond its message")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(number, offset of its end)"""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Damaged("a number has no end")


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def masked_crc32c(data: bytes) -> int:
    """The checksum of a length: CRC-32C (RFC 3720), turned and shifted as TensorFlow has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
