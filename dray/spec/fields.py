"""The kinds of values a job document is made of, and the base of its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictInt,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

MAX_STEPS = 10**12


def _plain_text(value: str) -> str:
    """Refuse what no name needs and what databases and terminals trip over."""
    for character in value:
        code = ord(character)
        if code < 32 or code == 127 or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"must not contain the control character U+{code:04X}")
    return value


def _a_number(value: Any) -> Any:
    """`true` and `"1"` are not numbers, though Python would take them for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


PlainText = Annotated[str, AfterValidator(_plain_text)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_plain_text)]
ColumnName = Annotated[PlainText, StringConstraints(min_length=1, max_length=256)]
LabelKey = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
]
LabelValue = Annotated[str, StringConstraints(max_length=255), AfterValidator(_plain_text)]
QueueName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9_-]*$")
]
MetricName = Annotated[str, StringConstraints(max_length=128, pattern=r"^val/[a-z0-9_]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[float, BeforeValidator(_a_number)]
Int = StrictInt


class Document(BaseModel):
    """Base of every part of the job document."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def wrong(pointer: str, message: str) -> PydanticCustomError:
    """What is wrong between fields, told of the one at `pointer` (RFC 6901), to be raised."""
    context = {"pointer": pointer, "message": message}
    return PydanticCustomError("wrong_together", "{message}", context)


def refuse_foreign(part: Document, name: str, owners: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse an option that the chosen name has no use for, if it was given a value of its own.

    owners: for each option that not all names share, the names it belongs to.
    """
    for option, names in owners.items():
        if name not in names and getattr(part, option) != type(part).model_fields[option].default:
            raise ValueError(f"{option} is an option of {' and '.join(names)}, not of {name}")
