"""The value types of a job document, and the base class of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from dray.input import model_names, units
from dray.input.names import unfit

MAX_STEPS = 10**12
TAG_FIELDS = ("name", "kind")
"""Discriminator fields, whose value selects one of several classes for a part of the document."""


def _plain_text(value: str) -> str:
    if (found := unfit(value)) is not None:
        raise ValueError(f"must not contain {found}")
    return value


def a_number(value: Any) -> Any:
    """Reject `true` and `"1"`, which pydantic would accept as numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


GPU_STEP = 0.0001
"""Smallest fraction of a GPU that Ray counts."""
LEAST_OF_A_GPU = 0.01


def _of_a_gpu(value: Any) -> Any:
    """Accept 0, 1, or a fraction of a GPU that Ray can count."""
    number = a_number(value)
    if number in (0, 1):
        return int(number)
    if not LEAST_OF_A_GPU <= number < 1:
        raise ValueError(
            f"must be 0, 1, or a fraction of a GPU such as 0.5 (at least {LEAST_OF_A_GPU})"
        )
    if abs(number / GPU_STEP - round(number / GPU_STEP)) > 1e-6:
        raise ValueError(f"must be a multiple of {GPU_STEP}, Ray's precision for GPU fractions")
    return float(number)


def _in_seconds(value: Any) -> Any:
    return units.seconds(value) if isinstance(value, str) else value


def _in_bytes(value: Any) -> Any:
    return units.num_bytes(value) if isinstance(value, str) else value


def _or_text(pattern: str, most: int, example: str) -> WithJsonSchema:
    """Return the JSON Schema of a number of at least 1 that can be written with a unit."""
    text = {"type": "string", "pattern": pattern, "examples": [example]}
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": most}, text]})


PlainText = Annotated[str, AfterValidator(_plain_text)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_plain_text)]
ColumnName = Annotated[PlainText, StringConstraints(min_length=1, max_length=256)]
LabelKey = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
]
LabelValue = Annotated[str, StringConstraints(max_length=255), AfterValidator(_plain_text)]
NodeLabelValue = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9._-]+$")
]
QUEUE_NAME = r"^[a-z0-9][a-z0-9_-]*$"
QueueName = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=QUEUE_NAME)]
ReservationName = QueueName
USER_NAME = r"[A-Za-z0-9._@-]{1,128}"
UserName = Annotated[str, StringConstraints(pattern=f"^{USER_NAME}$")]
MetricName = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^val/[a-z0-9_]+(/[a-z0-9_]+)*$")
]
ModelVersion = Annotated[
    str,
    StringConstraints(pattern=model_names.REFERENCE),
    AfterValidator(model_names.checked_reference),
]
"""A version of a registered model: `model://NAME@VERSION` or `model://NAME@ALIAS`."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
CODE_ID_PATTERN = "^code-[0-9a-f]{32}$"
JobId = Annotated[str, StringConstraints(pattern=r"^job-[0-9a-z]{1,60}$")]
CodeId = Annotated[str, StringConstraints(pattern=CODE_ID_PATTERN)]
# These types have no validator, because the JSON Schema that pydantic generates does not contain
# bounds that follow a validator.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Int = StrictInt
GpuShare = Annotated[
    int | float,
    BeforeValidator(_of_a_gpu),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 1},
                {"type": "number", "minimum": LEAST_OF_A_GPU, "exclusiveMaximum": 1},
            ]
        }
    ),
]
"""Number of GPUs of a worker: 0, 1 or a fraction."""
Seconds = Annotated[
    Int,
    Field(ge=1, le=10**8),
    BeforeValidator(_in_seconds),
    _or_text(units.DURATION, 10**8, "2h"),
]
"""A number of seconds, or a duration such as `2h`."""
Size = Annotated[
    Int, Field(ge=1, le=2**60), BeforeValidator(_in_bytes), _or_text(units.SIZE, 2**60, "8GiB")
]
"""A number of bytes, or a size such as `8GiB`."""


class Document(BaseModel):
    """Base of every part of the job document."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def wrong(pointer: str, message: str) -> PydanticCustomError:
    """Return the exception to raise for a conflict between fields. `pointer` is the JSON pointer
    (RFC 6901) of the invalid field."""
    context = {"pointer": pointer, "message": message}
    return PydanticCustomError("wrong_together", "{message}", context)


def refuse_set(part: Document, at: str, options: Iterable[str], message: str) -> None:
    """Reject `options` of the part at the pointer `at` if they differ from their defaults."""
    for option in options:
        if _is_set(part, option):
            raise wrong(f"{at}/{option}", message)


def refuse_foreign(part: Document, name: str, owners: Mapping[str, tuple[str, ...]]) -> None:
    """Reject options that the chosen `name` does not have, if they differ from their defaults.

    owners: for each option that is specific to some names, the names that have it.
    """
    for option, names in owners.items():
        if name not in names and _is_set(part, option):
            raise ValueError(f"{option} is an option of {' and '.join(names)}, not of {name}")


def _is_set(part: Document, option: str) -> bool:
    return bool(getattr(part, option) != type(part).model_fields[option].default)
