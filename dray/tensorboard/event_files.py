"""TensorBoard event files: their records, and events with scalars and text.

A file is a sequence of records. A record consists of the length of the data (8 bytes), the checksum
of the length, the data, and the checksum of the data. Checksums are 4 bytes, masked CRC-32C. The
data are a TensorFlow `Event` protocol buffer (tensorflow/core/util/event.proto). The record format
and `Event` no longer change. This module implements the required parts of the record format and of
`Event`, so that event files can be read and written without TensorFlow or TensorBoard.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import cache

MAX_RECORD_BYTES = 1 << 20
"""Maximum size of a record that is read. Longer records, which contain images, audio or graphs, are
skipped."""
HEADER_BYTES = 12
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")

# Protobuf field numbers.
EVENT_TIME, EVENT_STEP, EVENT_VERSION, EVENT_SUMMARY = 1, 2, 3, 5
SUMMARY_VALUE = 1
VALUE_TAG, VALUE_SIMPLE, VALUE_TENSOR, VALUE_METADATA = 1, 2, 8, 9
_TENSOR_TYPE, _TENSOR_SHAPE, _TENSOR_STRING = 1, 2, 8
_STRING = 7  # of `DataType`
_METADATA_PLUGIN, _PLUGIN_NAME = 1, 1


class Damaged(ValueError):
    """The bytes from this position on are not part of an event file."""


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (end offset, data) for each complete record, with empty data for records that are too
    long.

    An incomplete record at the end of `data` is yielded only if it is too long: the caller can then
    skip to its end offset once the rest of the record has been written. Raises Damaged if the
    checksum of a length is wrong."""
    at = 0
    while len(data) - at >= HEADER_BYTES:
        head = data[at : at + 8]
        (length,) = _LENGTH.unpack(head)
        if _CHECKSUM.unpack_from(data, at + 8)[0] != masked_crc32c(head):
            raise Damaged(f"the length of the record at byte {at} is damaged")
        end = at + HEADER_BYTES + length + 4
        if length > MAX_RECORD_BYTES:
            yield end, b""
        elif end > len(data):
            return
        else:
            yield end, data[at + HEADER_BYTES : end - 4]
        at = end


def check(data: bytes, end: bytes) -> None:
    """Raise Damaged if the checksum in `end` does not match the data of a record, for example
    because the machine crashed before the data were written. TensorBoard stops reading at a damaged
    record."""
    if data and not end.endswith(_CHECKSUM.pack(masked_crc32c(data))):
        raise Damaged("a record's data are damaged")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) for each field of a protocol buffer. The value is an int for a
    varint, and bytes otherwise. Raises Damaged if the bytes are not a valid protocol buffer."""
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
                raise Damaged(f"a field has the unknown wire type {other}")
        if at + length > len(message):
            raise Damaged("a field extends beyond the end of its message")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return (number, end offset)."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Damaged("a number is incomplete or too long")


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720), rotated and offset like TensorFlow's checksums."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _header(length: int) -> bytes:
    head = _LENGTH.pack(length)
    return head + _CHECKSUM.pack(masked_crc32c(head))


def record(data: bytes) -> bytes:
    return _header(len(data)) + data + _CHECKSUM.pack(masked_crc32c(data))


def version(time: float) -> bytes:
    """Return the first event of a file."""
    return _double(EVENT_TIME, time) + _bytes(EVENT_VERSION, b"brain.Event:2")


def scalars_event(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return an event with the scalars of one step, keyed by tag. Scalars are stored as 32-bit
    floats, as TensorBoard expects."""
    summary = b"".join(
        _bytes(SUMMARY_VALUE, _bytes(VALUE_TAG, tag.encode()) + _float(VALUE_SIMPLE, value))
        for tag, value in values.items()
    )
    return _event(time, step, summary)


def text_event(time: float, tag: str, markdown: str) -> bytes:
    """Return an event with text. TensorBoard shows the text with its `text` plugin."""
    tensor = _int(_TENSOR_TYPE, _STRING) + _bytes(_TENSOR_SHAPE, b"")
    tensor += _bytes(_TENSOR_STRING, markdown.encode())
    metadata = _bytes(_METADATA_PLUGIN, _bytes(_PLUGIN_NAME, b"text"))
    value = _bytes(VALUE_TAG, tag.encode()) + _bytes(VALUE_TENSOR, tensor)
    return _event(time, 0, _bytes(SUMMARY_VALUE, value + _bytes(VALUE_METADATA, metadata)))


def last_steps(data: bytes) -> dict[str, int]:
    """Return the step of each tag in an event created by `scalars_event`. Raises Damaged if the
    bytes are not a valid event."""
    step, tags = 0, []
    for number, value in fields(data):
        if number == EVENT_STEP and isinstance(value, int):
            step = value
        elif number == EVENT_SUMMARY and isinstance(value, bytes):
            for _, one in fields(value):
                known = dict(fields(one)) if isinstance(one, bytes) else {}
                tag = known.get(VALUE_TAG)
                if VALUE_SIMPLE in known and isinstance(tag, bytes):
                    tags.append(tag.decode())
    return dict.fromkeys(tags, step)


def _event(time: float, step: int, summary: bytes) -> bytes:
    return _double(EVENT_TIME, time) + _int(EVENT_STEP, step) + _bytes(EVENT_SUMMARY, summary)


def _int(number: int, value: int) -> bytes:
    return _encoded(number << 3) + _encoded(value)


def _double(number: int, value: float) -> bytes:
    return _encoded(number << 3 | 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | 2) + _encoded(len(value)) + value


def _float(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _encoded(number << 3 | 5) + packed


def _encoded(value: int) -> bytes:
    """Return the value as a varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
