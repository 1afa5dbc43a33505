"""Scalars in TensorBoard event files. `dray.tensorboard.event_files` describes their format."""

from __future__ import annotations

import struct

from dray.tensorboard.event_files import (
    EVENT_STEP,
    EVENT_SUMMARY,
    SUMMARY_VALUE,
    VALUE_SIMPLE,
    VALUE_TAG,
    VALUE_TENSOR,
    fields,
)
from ray_workers.node.found_metrics.lines import MAX_STEP, FoundPoint, is_key

_FLOAT, _DOUBLE = 1, 2  # of `DataType`
_FORMATS = {_FLOAT: "<f", _DOUBLE: "<d"}

_TENSOR_TYPE, _TENSOR_SHAPE, _TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES = 1, 2, 4, 5, 6
_SHAPE_DIM, _DIM_SIZE = 2, 1


def scalars(event: bytes) -> list[FoundPoint]:
    """Return the scalars of an event, keyed by tag. Raises Damaged if `event` is not an event."""
    step, found = 0, []
    for number, value in fields(event):
        if number == EVENT_STEP and isinstance(value, int):
            step = value
        elif number == EVENT_SUMMARY and isinstance(value, bytes):
            for inner, one in fields(value):
                if inner == SUMMARY_VALUE and isinstance(one, bytes):
                    found.append(_tagged(one))
    if step > MAX_STEP:  # a negative step is decoded as a huge number
        return []
    return [
        FoundPoint(tag, step, number)
        for tag, number in found
        if number is not None and is_key(tag) and not tag.startswith("_hparams_")
    ]


def _tagged(summary: bytes) -> tuple[str, float | None]:
    tag, number = "", None
    for field, value in fields(summary):
        if field == VALUE_TAG and isinstance(value, bytes):
            tag = value.decode(errors="replace")
        elif field == VALUE_SIMPLE and isinstance(value, bytes) and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == VALUE_TENSOR and isinstance(value, bytes):
            number = _one_number(value)
    return tag, number


def _one_number(tensor: bytes) -> float | None:
    """Return the number in a tensor of one float or double; None for any other tensor."""
    kind, content, size = 0, b"", 1
    for field, value in fields(tensor):
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
    for field, dim in fields(shape):
        if field == _SHAPE_DIM and isinstance(dim, bytes):
            sizes = [value for inner, value in fields(dim) if inner == _DIM_SIZE]
            size *= sizes[-1] if sizes and isinstance(sizes[-1], int) else 0
    return size
