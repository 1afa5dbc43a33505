"""Points in time as users write them: with an offset from UTC, in the local time of a time zone, or
in words such as `tomorrow 08:00`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from functools import cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from dray.input import units
from dray.input.names import nearest

TIME: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})?$"
)
"""Pattern of a time in RFC 3339, whose offset from UTC and seconds can be omitted."""
FIRST_YEAR, LAST_YEAR = 2000, 2999
_SECOND = timedelta(seconds=1)
_CLOCK = r"(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2}))?\s*(?P<half>am|pm)?"
_WORDS = re.compile(
    r"(?:(?P<day>today|tomorrow|[0-9]{4}-[0-9]{2}-[0-9]{2})(?:[ t]\s*|$))?"
    rf"(?:{_CLOCK}|(?P<name>midnight|noon))?"
)
_FROM_NOW = re.compile(r"now(?:\s*\+\s*(?P<number>[0-9]{1,9})\s*(?P<unit>[a-z]*))?")
_UNITS: Final = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}
FORMS: Final = (
    "write a time such as '2026-12-01T08:00:00+01:00', '2026-12-01 08:00', 'tomorrow 08:00', "
    "'16:30' or 'now+2hours'"
)


class SystemZone(tzinfo):
    """The time zone of this machine, including its changes to and from daylight saving time."""

    def utcoffset(self, at: datetime | None) -> timedelta | None:
        return None if at is None else at.replace(tzinfo=None).astimezone().utcoffset()

    def dst(self, at: datetime | None) -> timedelta | None:
        return None

    def tzname(self, at: datetime | None) -> str | None:
        return None if at is None else at.replace(tzinfo=None).astimezone().tzname()

    def fromutc(self, at: datetime) -> datetime:
        return at.replace(tzinfo=UTC).astimezone().replace(tzinfo=self)


def parse(text: str) -> datetime:
    """Parse a time in RFC 3339, such as `2026-12-01T08:00:00+01:00`. The result is naive if the
    offset is omitted. Raises ValueError for other strings."""
    if not re.fullmatch(TIME, text):
        raise ValueError("must be a time such as 2026-12-01T08:00:00+01:00")
    found = datetime.fromisoformat(text.upper())
    if not FIRST_YEAR <= found.year <= LAST_YEAR:
        raise ValueError(f"must be in the years {FIRST_YEAR} to {LAST_YEAR}")
    return found


LONGEST_NAME = 64
"""Maximum number of characters of the name of a time zone. The search for a name with hundreds of
parts would exceed Python's recursion limit."""


def zone_named(name: str) -> ZoneInfo:
    """Return the time zone of the IANA database, such as `Europe/Berlin`. Raises ValueError for an
    unknown name, and for a name whose zone depends on the host."""
    if len(name) > LONGEST_NAME:
        raise ValueError(f"is not a time zone: it has {len(name)} characters")
    if not _is_portable(name):
        raise ValueError(
            f"{name!r} is not the same time zone on all hosts: use a name such as Europe/Berlin or "
            "UTC"
        )
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        hint = nearest(name, _zone_names())
        known = hint or "use a name such as Europe/Berlin or UTC"
        raise ValueError(f"{name!r} is not a known time zone: {known}") from None


def _is_portable(name: str) -> bool:
    is_of_host = name.rpartition("/")[2] in {"localtime", "posixrules", "Factory"}
    return not is_of_host and not name.startswith("right/")


@cache
def _zone_names() -> list[str]:
    return sorted(filter(_is_portable, available_timezones()))


def localised(local: datetime, zone: tzinfo, where: str) -> datetime:
    """Return the naive time `local` as an aware time of the zone, with its offset from UTC. `where`
    names the zone.

    Raises ValueError if clocks skip this time or show it twice.
    """
    early, late = (_with_offset(local.replace(tzinfo=zone, fold=fold)) for fold in (0, 1))
    before, after = early.utcoffset(), late.utcoffset()
    assert before is not None
    assert after is not None
    if before == after:
        return early
    shown = local.isoformat()
    if before > after:
        raise ValueError(
            f"{shown} occurs twice in {where}, because clocks are set back: write "
            f"{early.isoformat()} or {late.isoformat()}"
        )
    first = first_change(late, early, zone)
    last = (first - _SECOND).astimezone(timezone(before))
    first = first.astimezone(timezone(after))
    skipped = (last + _SECOND).replace(tzinfo=None), first.replace(tzinfo=None)
    raise ValueError(
        f"{shown} does not exist in {where}, because clocks are set forward from "
        f"{skipped[0].isoformat()} to {skipped[1].isoformat()}: the nearest times are "
        f"{last.isoformat()} and {first.isoformat()}"
    )


def _with_offset(at: datetime) -> datetime:
    offset = at.utcoffset()
    assert offset is not None
    return at.replace(tzinfo=timezone(offset), fold=0)


def first_change(before: datetime, after: datetime, zone: tzinfo) -> datetime:
    """Return, in UTC, the first second after the change of the zone's offset between these two
    times."""
    low = before.astimezone(UTC).replace(microsecond=0)
    high = after.astimezone(UTC).replace(microsecond=0) + _SECOND
    old = low.astimezone(zone).utcoffset()
    while high - low > _SECOND:
        middle = low + (high - low) // 2 // _SECOND * _SECOND
        if middle.astimezone(zone).utcoffset() == old:
            low = middle
        else:
            high = middle
    return high


def from_words(text: str, now: datetime, zone: tzinfo, where: str) -> datetime:
    """Return the time that a user wrote, relative to `now`, with its offset from UTC. Times without
    an offset are local times of `zone`.

    A time of day without a date means the next occurrence of this time. A date without a time of
    day means midnight at the beginning of this date. Raises ValueError for other strings, and in
    the same cases as `localised`.
    """
    words = text.strip().lower()
    if re.fullmatch(TIME, words):
        found = parse(words)
        return found if found.tzinfo is not None else localised(found, zone, where)
    if (relative := _FROM_NOW.fullmatch(words)) is not None:
        return now + _span(relative["number"], relative["unit"])
    if words.startswith("now+"):
        return now + timedelta(seconds=units.seconds(words.removeprefix("now+")))
    parts = _WORDS.fullmatch(words)
    if parts is None or not words:
        raise ValueError(FORMS)
    today = now.astimezone(zone).date()
    clock = _time_of_day(parts)
    if parts["day"] is None:
        today_at = localised(datetime.combine(today, clock), zone, where)
        if today_at > now:
            return today_at
        return localised(datetime.combine(today + timedelta(days=1), clock), zone, where)
    days = {"today": today, "tomorrow": today + timedelta(days=1)}
    day = days.get(parts["day"]) or parse(f"{parts['day']}T00:00").date()
    return localised(datetime.combine(day, clock), zone, where)


def _span(number: str | None, unit: str | None) -> timedelta:
    if number is None:
        return timedelta()
    seconds = _UNITS.get((unit or "").removesuffix("s"))
    if seconds is None:
        return timedelta(seconds=units.seconds(f"{number}{unit}"))
    return timedelta(seconds=int(number) * seconds)


def _time_of_day(parts: re.Match[str]) -> time:
    if parts["hour"] is None:
        return time(12) if parts["name"] == "noon" else time(0)
    hour, half = int(parts["hour"]), parts["half"]
    if half is not None:
        if not 1 <= hour <= 12:
            raise ValueError(f"{hour} {half} is not a time of day")
        hour = hour % 12 + (12 if half == "pm" else 0)
    return time(hour, int(parts["minute"]), int(parts["second"] or 0))
