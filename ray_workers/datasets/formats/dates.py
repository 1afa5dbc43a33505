"""Convert dates and times to numbers, in Arrow columns and as single values."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

PARTS = ("days", "year", "month", "day", "weekday", "hour")
"""The model's inputs for a date. `days` (since 1970) and `hour` are fractional; Monday is 0."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_US = 86_400_000_000
_HOUR_US = 3_600_000_000
_ZONE = r"[T ].*(Z|[+-]\d\d(:?\d\d)?)$"


def parts_of(microseconds: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Convert (n,) microseconds since 1970 in UTC to (n, PARTS)."""
    when = microseconds.astype("datetime64[us]")
    days, months, years = (when.astype(f"datetime64[{unit}]") for unit in "DMY")
    day = days.astype(np.int64)
    columns = (
        microseconds / _DAY_US,
        years.astype(np.int64) + 1970,
        months.astype(np.int64) % 12 + 1,
        (days - months.astype("datetime64[D]")).astype(np.int64) + 1,
        (day + 3) % 7,  # 1970 began on a Thursday
        (microseconds - day * _DAY_US) / _HOUR_US,
    )
    return np.stack(columns, axis=1).astype(np.float64)


def microseconds_of(value: Any) -> int:
    """Return the microseconds since 1970 of an ISO 8601 string, or of a Python, NumPy or pandas
    date or time. Values without a time zone are in UTC. Raises ValueError for anything else."""
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[us]").astype(np.int64))
    if isinstance(value, str):
        value = datetime.fromisoformat(value.strip())
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ValueError(f"{value!r} is not a date")
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    found: int = (value - _EPOCH) // timedelta(microseconds=1)
    return found


def is_date_type(kind: Any) -> bool:
    """Whether columns of this Arrow type contain dates."""
    from pyarrow import types

    return bool(types.is_date(kind) or types.is_timestamp(kind))


def times_in(column: Any) -> Any | None:
    """Return Arrow timestamps in UTC, in microseconds, for a column of dates or ISO 8601 strings.
    Returns None if some values are not dates."""
    import pyarrow as pa
    import pyarrow.compute as pc

    plain, zoned = pa.timestamp("us"), pa.timestamp("us", "UTC")
    if is_date_type(column.type):
        zone = getattr(column.type, "tz", None)
        if column.type == pa.timestamp("ns", zone):
            column = pc.floor_temporal(
                column, unit="microsecond"
            )  # a cast would round towards 1970
        return column.cast(pa.timestamp("us", zone)).cast(zoned)
    texts = pc.replace_substring_regex(column, r"(\.\d{6})\d+", r"\1")
    has_zone = pc.match_substring_regex(texts, _ZONE)
    nothing = pa.scalar(None, texts.type)
    try:
        with_zone = pc.if_else(has_zone, texts, nothing).cast(zoned)
        without = pc.if_else(has_zone, nothing, texts).cast(plain).cast(pa.int64()).cast(zoned)
    except pa.ArrowInvalid:
        return None
    return pc.coalesce(with_zone, without)
