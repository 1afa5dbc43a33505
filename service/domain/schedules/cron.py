"""The times of a cron expression in a time zone.

Changes of a zone's clocks follow the rule of Debian's cron:

- If neither the minute nor the hour begins with `*`, each matching local time counts once per day:
  a time that clocks skip is moved to the first moment after the skipped times, and a time that
  clocks show twice counts only the first time.
- Otherwise, the expression describes an interval, and a moment counts if the clock shows a matching
  time: skipped times don't count, and repeated times count twice.

The library `cronsim` computes matching local times without a zone. The time zone support of
`cronsim` loses times if clocks change by half an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import takewhile
from typing import Final

from cronsim import CronSim, CronSimError

from dray.input.times import first_change

LONGEST: Final = 256
"""Maximum number of characters of an expression."""
YEARS: Final = 10
"""The search for the next time ends after this number of years. Leap days are at most 8 apart."""
_SPAN: Final = timedelta(days=YEARS * 365 + 3)
_STEP: Final = timedelta(days=7)
_SECOND: Final = timedelta(seconds=1)
_NAMED: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_EXAMPLE: Final = "such as '30 2 * * *' for 02:30 every day"


class BadCron(ValueError):
    """The expression is invalid. `hint` states how to correct it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _NextTime(CronSim):
    """The matching local times that are later than `after` and not later than `until`."""

    def __init__(self, fields: str, after: datetime, until: datetime) -> None:
        super().__init__(fields, after)
        self._until = until

    def advance_month(self) -> None:  # called for each month that is searched
        super().advance_month()
        if self.dt > self._until:
            raise StopIteration


class Cron:
    """A cron expression in a time zone. Raises BadCron for an invalid expression."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._fields = _fields(expression)
        self._zone = zone
        minute, hour, *_ = self._fields.split()
        self._is_interval = minute.startswith("*") or hour.startswith("*")

    def next_after(self, at: datetime) -> datetime | None:
        """Return the first time after `at`, in UTC; None if there is none within `YEARS` years or
        before the year 10000."""
        find = self._next_of_interval if self._is_interval else self._next_of_times
        try:
            return find(at.astimezone(UTC))
        except (StopIteration, OverflowError):
            return None

    def times_after(self, at: datetime) -> Iterator[datetime]:
        found = self.next_after(at)
        while found is not None:
            yield found
            found = self.next_after(found)

    def latest(self, after: datetime, until: datetime, most: int) -> list[datetime]:
        """Return the last `most` times that are later than `after` and not later than `until`.

        The cost depends on `most`, and not on the number of times in this period.
        """
        span = timedelta(minutes=most)
        while True:
            is_complete = until - after <= span
            start = after if is_complete else until - span
            found = list(takewhile(lambda time: time <= until, self.times_after(start)))
            if is_complete or len(found) >= most:
                return found[-most:]
            span *= 2

    def _local(self, at: datetime) -> datetime:
        return at.astimezone(self._zone).replace(tzinfo=None)

    def _offset(self, at: datetime) -> timedelta:
        return self._local(at) - at.replace(tzinfo=None)

    def _next_of_times(self, at: datetime) -> datetime:
        after = self._local(at)
        for local in _NextTime(self._fields, after, after + _SPAN):
            found = self._first_moment(local)
            if found > at:
                return found
        raise StopIteration

    def _first_moment(self, local: datetime) -> datetime:
        """Return the first moment at which the clock shows `local` or, if it never does, the first
        moment after the skipped times."""
        found = local.replace(tzinfo=self._zone).astimezone(UTC)
        if self._local(found) == local:
            return found
        return first_change(local.replace(tzinfo=self._zone, fold=1), found, self._zone)

    def _next_of_interval(self, at: datetime) -> datetime:
        after = self._local(at)
        until = after + _SPAN
        first = next(_NextTime(self._fields, after, until))
        while True:
            offset = self._offset(at)
            found = (first - offset).replace(tzinfo=UTC)
            change = self._change(at, found)
            if change is None:
                return found
            shown = self._local(change) - _SECOND
            # No time between `after` and `first` matches, so most changes need no other search.
            if not after <= shown < first:
                after, first = shown, next(_NextTime(self._fields, shown, until))
            at = change

    def _change(self, start: datetime, end: datetime) -> datetime | None:
        """Return the first time after `start`, and not after `end`, at which the offset of the zone
        changes; None if there is none. Offsets don't change twice within a week."""
        offset = self._offset(start)
        while start < end:
            low, start = start, min(start + _STEP, end)
            if self._offset(start) != offset:
                return first_change(low, start, self._zone)
        return None


def _fields(expression: str) -> str:
    """Return the five fields of an expression. Raises BadCron."""
    words = _NAMED.get(expression.strip().lower(), expression).split()
    if expression.strip().startswith("@") and len(words) == 1:
        raise BadCron(
            f"{expression.strip()[:30]!r} is not a predefined schedule",
            f"use {', '.join(_NAMED)}, or five fields {_EXAMPLE}",
        )
    if len(words) != 5:
        has = f"has {len(words)} field{'' if len(words) == 1 else 's'}"
        no_seconds = "; seconds can't be set" if len(words) == 6 else ""
        raise BadCron(
            f"{has}, but a cron expression has 5{no_seconds}",
            f"write minute, hour, day of the month, month and day of the week, {_EXAMPLE}",
        )
    text = " ".join(words)
    try:
        if len(text) > LONGEST or not text.isascii():
            raise CronSimError(f"not ASCII, or longer than {LONGEST} characters")
        CronSim(text, datetime(2000, 1, 1))
    except CronSimError as error:
        problem = str(error)
        raise BadCron(
            f"is not a cron expression: {problem[:1].lower()}{problem[1:]}",
            "minutes are 0-59, hours 0-23, days of the month 1-31 (only days that the months "
            "have), months 1-12 or JAN-DEC, days of the week 0-7 or SUN-SAT; lists, ranges and "
            "steps are written 1,15 and 1-5 and */10",
        ) from None
    return text
