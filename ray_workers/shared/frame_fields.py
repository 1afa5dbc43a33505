"""The types of frame fields. A type defines the accepted values, and converts strings to a form
that can be stored.

Pydantic validates the fields when frames arrive. A validator raises ValueError if it rejects a
value. `service.ingest.decoding` looks up the annotations of the classes in `frames` in this module.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationInfo,
)
from pydantic.types import AllowInfNan

from dray.media.kinds import MediaKind
from dray.secure_aggregation.messages import MaskingPhase
from dray.spec import MAX_WORKERS
from dray.spec import OnDivergence as OnDivergence
from dray.spec.federated.parts import MAX_CLIENTS
from ray_workers.shared.contracts import MAX_PACKAGES
from ray_workers.shared.round_files import UPDATE, number_of
from ray_workers.shared.slices import Slice

MAX_STEP = 2**53
"""Maximum step. Step numbers up to this limit are exact in JSON, and far below the maximum of a
64-bit column."""
MAX_SECONDS = 1e12
MAX_KEY_CHARS = 128
MAX_PHASE_CHARS = 64
MAX_RECEIPT_CHARS = 2048
SYSTEM_PREFIX = "system/"
TIMES = "@time"
"""Name of the series with the Unix time at which rank 0 first reported each step of an attempt. No
metric can have this name."""


def clean(text: str) -> str:
    """Return the string in a form that every database can store: without NUL (PostgreSQL) and lone
    surrogates (UTF-8)."""
    return text.replace("\0", "␀").encode("utf-8", "replace").decode()


def metric_key(key: str) -> str:
    """Return the metric name, or raise ValueError if it is invalid."""
    if not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ValueError(f"not a valid metric name: {key!r}")
    if key == TIMES:
        raise ValueError(f"{key!r} is reserved for dray's own series")
    return key


def up_to(limit: int) -> Any:
    """Return a field constraint: 0 to `limit`, inclusive."""
    return Field(ge=0, le=limit)


def cut(limit: int, *, from_end: bool = False) -> BeforeValidator:
    """Convert a value to a string, and truncate it to its first or last `limit` characters. None
    becomes an empty string."""

    def validate(value: object) -> str:
        text = "" if value is None else clean(str(value))
        return text[-limit:] if from_end else text[:limit]

    return BeforeValidator(validate)


def first(limit: int) -> BeforeValidator:
    """Keep the first `limit` items of a list."""
    return BeforeValidator(lambda value: value[:limit] if isinstance(value, list) else value)


def _ranks(limit: int) -> AfterValidator:
    return AfterValidator(lambda ranks: sorted(set(ranks))[:limit])


def _short(text: str) -> str:
    # Don't use `max_length`, because it makes pydantic reject strings that contain lone surrogates.
    if len(text) > MAX_RECEIPT_CHARS:
        raise ValueError(f"longer than {MAX_RECEIPT_CHARS} characters")
    return clean(text)


def _as_stored(url: str) -> str:
    if clean(url) != url:
        raise ValueError(f"can't be stored: {url!r}")
    return url


def _of_ranks(values: Mapping[str, float], info: ValidationInfo) -> Mapping[str, float]:
    return {str(rank): values[str(rank)] for rank in info.data.get("ranks", ())}


def _name_of_round(name: str, info: ValidationInfo) -> str:
    if number_of(name) != info.data.get("number"):
        raise ValueError(f"does not match the number of the round: {name!r}")
    return name


def _awaited(value: str) -> str:
    """Reject unknown values, because the value becomes part of a path."""
    if value not in (UPDATE, *MaskingPhase):
        raise ValueError(f"clients can't send messages of the type {value!r}")
    return value


def _decoded(text: object) -> bytes | None:
    return None if text is None else base64.b64decode(str(text), validate=True)


def _collective(value: object) -> int | str | None:
    if type(value) is not int:
        return None if value is None else clean(str(value))[:MAX_PHASE_CHARS]
    if not 0 <= value <= MAX_STEP:
        raise ValueError(f"not a count: {value}")
    return value


def _rising(ranks: Sequence[int]) -> Sequence[int]:
    if list(ranks) != sorted(set(ranks)):
        raise ValueError("ranks must be in ascending order, without duplicates")
    return ranks


def _of_each_rank(
    values: Mapping[str, Sequence[float]], info: ValidationInfo
) -> Mapping[str, Sequence[float]]:
    num_ranks = len(info.data.get("ranks", ()))
    for key, column in values.items():
        if len(column) != num_ranks or not key.startswith(SYSTEM_PREFIX):
            raise ValueError(
                f"{key!r} must be a system metric with one value for each of {num_ranks} ranks"
            )
    return values


def _packages(value: Any) -> Any:
    """Keep the first packages, so that a report has a limited size."""
    return dict(list(value.items())[:MAX_PACKAGES]) if isinstance(value, dict) else value


MISSING_IS_NONE: Any = Field(default=None)
MISSING_IS_EMPTY: Any = Field(default="")

Count = Annotated[StrictInt, up_to(MAX_STEP)]
MaybeCount = Annotated[Count | None, MISSING_IS_NONE]
Bytes = Annotated[StrictInt, up_to(2**62)]
Workers = Annotated[StrictInt, up_to(MAX_WORKERS)]
Clients = Annotated[StrictInt, up_to(MAX_CLIENTS)]
Number = StrictFloat
MaybeNumber = Annotated[Number | None, MISSING_IS_NONE]
Finite = Annotated[StrictFloat, AllowInfNan(False)]
"""A number that JSON can represent. PostgreSQL does not store other numbers in JSON."""
MaybeSeconds = Annotated[
    Annotated[StrictFloat, Field(ge=0, le=MAX_SECONDS)] | None, MISSING_IS_NONE
]
Ranks = Annotated[Sequence[Count], _ranks(MAX_WORKERS)]
"""Rank numbers, sorted and without duplicates."""
ClientNumbers = Annotated[Sequence[Count], _ranks(MAX_CLIENTS)]
"""Client numbers, sorted and without duplicates."""
Flag = StrictBool
LedgerSeconds = Mapping[StrictStr, Finite]
MetricKey = Annotated[StrictStr, AfterValidator(metric_key)]
Sha256 = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
Url = Annotated[StrictStr, AfterValidator(_as_stored)]
Receipt = Annotated[StrictStr, AfterValidator(_short)]
AnyText = Annotated[str, BeforeValidator(str)]
Text = Annotated[StrictStr, AfterValidator(clean)]
Message = Annotated[str, cut(4096), MISSING_IS_EMPTY]
SampleText = Annotated[str, cut(4096)]
PackageText = Annotated[StrictStr, cut(128)]
Packages = Annotated[Mapping[PackageText, PackageText], BeforeValidator(_packages)]
MediaName = Annotated[MediaKind, BeforeValidator(MediaKind)]
MediaData = Mapping[StrictStr, Any]
"""JSON data, which `service.ingest.media_checks` checks."""
MediaContent = Annotated[bytes | None, BeforeValidator(_decoded), MISSING_IS_NONE]
"""The bytes of a file, which frames contain in base64."""
DrillMessage = Annotated[str, cut(1024), MISSING_IS_EMPTY]
Code = Annotated[str, cut(64), MISSING_IS_EMPTY]
Phase = Annotated[
    str | None, AfterValidator(lambda text: text or None), cut(MAX_PHASE_CHARS), MISSING_IS_NONE
]
Traceback = Annotated[str, cut(16 * 1024, from_end=True), MISSING_IS_EMPTY]
Stack = Annotated[
    Annotated[str, BeforeValidator(lambda text: clean(str(text)))] | None, MISSING_IS_NONE
]
LineNumber = Annotated[StrictInt, up_to(2**40)]
"""A line number in a log. Gaps between the numbers are summed in a 64-bit column."""

of_ranks = AfterValidator(_of_ranks)
"""Keeps only the values for the `ranks` of the same report."""

RoundName = Annotated[StrictStr, Field(max_length=64), AfterValidator(_name_of_round)]
Awaited = Annotated[StrictStr, AfterValidator(_awaited)]
UpdateElements = Annotated[StrictInt, up_to(2**40)]
UpdateBytes = Annotated[StrictInt, up_to(2**42)]

Collective = Annotated[int | str | None, BeforeValidator(_collective), MISSING_IS_NONE]

RisingRanks = Annotated[Sequence[Count], Field(max_length=MAX_WORKERS), AfterValidator(_rising)]
SystemMetrics = Annotated[
    Mapping[MetricKey, Sequence[Annotated[StrictFloat, Field(ge=0, le=1e30)]]],
    Field(max_length=100),
    AfterValidator(_of_each_rank),
]
"""A mapping from metric name to a list with a value for each of the `ranks` of the same report."""


@dataclass(frozen=True)
class _HeldSlots:
    node_id: Annotated[str, cut(128), MISSING_IS_EMPTY]
    num_workers: Workers


_ALL_HELD = TypeAdapter(Annotated[Sequence[_HeldSlots], Field(max_length=MAX_WORKERS)])


def _slices(rows: object) -> Sequence[Slice]:
    held = _ALL_HELD.validate_python(rows)
    return [Slice(slots.node_id, slots.num_workers) for slots in held if slots.num_workers]


Slots = Annotated[Sequence[Slice], BeforeValidator(_slices)]
