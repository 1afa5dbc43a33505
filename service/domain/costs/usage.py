"""The usage by jobs over time: quarters of an hour, in which usage is stored, and the hours or days
of a time zone, in which it is shown.

Usage is stored for each quarter of an hour, because the offset of every time zone from UTC is a
multiple of 15 minutes. Therefore each hour and each day of each time zone consists of whole
quarters. The sums of whole hours are stored too, because most offsets are whole hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from itertools import pairwise
from statistics import median_low
from typing import Literal
from zoneinfo import ZoneInfo

QUARTER_S = 900
OF_HOUR = 4
"""Number of quarters in an hour."""
AMOUNTS = (
    *("slot_seconds", "cpu_seconds", "gpu_seconds", "gpu_measured_s", "gpu_idle_s", "cost"),
    *("num_started", "num_succeeded", "num_failed", "num_cancelled"),
)
"""The amounts that are added up for each quarter, user and queue. `gpu_measured_s` and `gpu_idle_s`
are GPU-seconds of samples, and the rest of `gpu_seconds` has not been measured."""
IDLE_BELOW = 0.05
"""A GPU is idle while a kernel runs on it for less than this fraction of the time."""
MAX_GAP = 3
"""A sample covers the time since the previous sample, unless this time is longer than MAX_GAP times
the median time between two of the samples."""

Per = Literal["hour", "day"]
MAX_DAYS: Mapping[Per, int] = {"hour": 31, "day": 366}
"""Maximum length of a report in days."""


@dataclass(frozen=True)
class UsageKey:
    """The quarter (Unix time divided by QUARTER_S), user, queue and currency of an amount.

    The currency is that of the costs in the row; empty if there are none.
    """

    quarter: int
    owner: str
    queue: str
    currency: str = ""


def quarter_of(at: datetime) -> int:
    return int(at.timestamp() // QUARTER_S)


def quarter_bounds(since: datetime, until: datetime) -> list[int]:
    """Return the Unix times between which the quarters from `since` to `until` lie."""
    first, last = quarter_of(since), quarter_of(until)
    return [QUARTER_S * quarter for quarter in range(first, last + 2)]


@dataclass(frozen=True)
class UsageBuckets:
    """The consecutive hours or days of a report."""

    bounds: Sequence[int]
    """Unix times in seconds, all multiples of QUARTER_S. Bucket `n` is between bounds `n` and
    `n + 1`."""

    @classmethod
    def of(cls, since: datetime, until: datetime, per: Per, zone: ZoneInfo) -> UsageBuckets:
        """Return the hours or days of the time zone that contain any of the time from `since` to
        `until`."""
        first = _begin_of(since.astimezone(zone), per)
        bounds = [_unix(first)]
        while bounds[-1] < until.timestamp():
            bounds.append(_after(bounds[-1], per, zone))
        return cls(bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def starts(self) -> list[datetime]:
        return [datetime.fromtimestamp(bound, UTC) for bound in self.bounds[:-1]]

    @property
    def until(self) -> datetime:
        return datetime.fromtimestamp(self.bounds[-1], UTC)

    @property
    def length(self) -> int:
        """Number of quarters of the rows from which the report can be read: OF_HOUR or 1."""
        return 1 if any(bound % 3600 for bound in self.bounds) else OF_HOUR

    def runs(self) -> list[BucketRun]:
        """Return runs of buckets of the same length: usually one, and more with days that have 23
        or 25 hours."""
        found: list[BucketRun] = []
        for index, (begin, end) in enumerate(pairwise(self.bounds)):
            length = (end - begin) // QUARTER_S
            if not found or found[-1].length != length:
                found.append(BucketRun(index, begin // QUARTER_S, length))
        return found


@dataclass(frozen=True)
class BucketRun:
    """Consecutive buckets of the same length."""

    index: int
    """Index of the first bucket."""
    quarter: int
    """The first quarter."""
    length: int
    """Number of quarters in each bucket."""


def _begin_of(local: datetime, per: Per) -> datetime:
    if per == "day":
        return datetime.combine(local.date(), time(), local.tzinfo)
    # Subtract in UTC: the local time can have been set forward or back since the hour began.
    passed = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
    return local.astimezone(UTC) - passed


def _after(bound: int, per: Per, zone: ZoneInfo) -> int:
    """Return the beginning of the next hour or day."""
    local = datetime.fromtimestamp(bound, zone)
    if per == "hour":
        return bound + 3600 - 60 * local.minute
    day = local.date() + timedelta(days=1)
    while (begin := _unix(datetime.combine(day, time(), zone))) <= bound:
        day += timedelta(days=1)  # a zone that crosses the date line leaves out a day
    return begin


def _unix(at: datetime) -> int:
    return int(at.timestamp()) // QUARTER_S * QUARTER_S


def measured(times: Sequence[int], uses: Sequence[float]) -> Iterator[tuple[int, float, bool]]:
    """Yield (quarter, seconds, whether the GPU was idle) for each sample of a GPU's utilization.

    A sample covers the time since the previous sample. NaN, as the value of a sample, means that
    the GPU was not measured.
    """
    gaps = [after - before for before, after in pairwise(times)]
    if not gaps:
        return
    usual = median_low(gaps)
    for at, gap, use in zip(times, [usual, *gaps], uses, strict=True):
        if gap <= MAX_GAP * usual and use == use:
            yield at // QUARTER_S, float(gap), use < IDLE_BELOW
