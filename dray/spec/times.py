"""When a job may start, and when it must have ended."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema

from dray.input import times
from dray.spec.fields import wrong

_TIMES: Final = ("begin_at", "deadline", "end_at")
"""Fields whose local times belong to the zone in `time_zone`."""


def _a_time(value: Any) -> datetime:
    if isinstance(value, datetime):
        value = value.isoformat()
    if not isinstance(value, str):
        raise ValueError("must be a string such as 2026-12-01T08:00:00+01:00")
    found = times.parse(value)
    if found.tzinfo is None:
        raise ValueError(
            "has no offset from UTC: append one, such as Z or +01:00, or set time_zone to the name "
            "of a time zone, such as Europe/Berlin"
        )
    return found


Time = Annotated[
    datetime,
    BeforeValidator(_a_time),
    WithJsonSchema({"type": "string", "pattern": times.TIME, "examples": ["2026-12-01T08:00:00Z"]}),
]
"""A time in RFC 3339, with its offset from UTC."""


def with_offsets(document: Any) -> Any:
    """Return the document with an offset from UTC in each time, and without `time_zone`. A stored
    document is therefore read in the same way on a machine that does not know the zone."""
    if not isinstance(document, Mapping) or not isinstance(document.get("time_zone"), str):
        return document
    given = {name: value for name, value in document.items() if name != "time_zone"}
    name = document["time_zone"]
    try:
        zone = times.zone_named(name)
    except ValueError as error:
        raise wrong("/time_zone", str(error)) from None
    for field in _TIMES:
        if not isinstance(given.get(field), str):
            continue
        try:
            found = times.parse(given[field])
            if found.tzinfo is None:
                given[field] = times.localised(found, zone, name).isoformat()
        except ValueError as error:
            raise wrong(f"/{field}", str(error)) from None
    return given


def check_order(begin_at: datetime | None, deadline: datetime | None) -> None:
    """Refuse a deadline that is not later than the begin time."""
    if begin_at is not None and deadline is not None and deadline <= begin_at:
        began = begin_at.astimezone(UTC).isoformat()
        raise wrong("/deadline", f"is not later than begin_at, which is {began}")
