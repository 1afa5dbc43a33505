"""The usage of the cluster over time: what users and queues used, its cost, and why jobs
waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.input.times import zone_named
from service.costs.usage import slots_of
from service.db.repositories.scheduling import usage as repository
from service.db.session import Database
from service.domain.callers import Caller
from service.domain.costs.slot_history import SlotHistory
from service.domain.costs.usage import AMOUNTS, MAX_DAYS, Per, UsageBuckets
from service.domain.errors import InvalidParameter

MAX_SERIES = 20
"""Maximum number of users or queues with their own series."""
FIRST_YEAR = 2000
DEFAULT_DAYS: Mapping[Per, int] = {"hour": 1, "day": 7}

By = Literal["user", "queue"]


@dataclass
class _SeriesAmounts:
    """The amounts of one series, each a list with one number for each bucket."""

    num_buckets: int
    of: dict[str, list[float]] = field(default_factory=dict)
    costs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, bucket: int, name: str, currency: str, amount: float) -> None:
        lists, key = (self.costs, currency) if name == "cost" else (self.of, name)
        if key not in lists:
            lists[key] = [0] * self.num_buckets
        lists[key][bucket] += amount

    @property
    def slot_seconds(self) -> float:
        return sum(self.of.get("slot_seconds", ()))

    def join(self, other: _SeriesAmounts) -> None:
        for lists, others in ((self.of, other.of), (self.costs, other.costs)):
            for key, numbers in others.items():
                before = lists.get(key, [0] * self.num_buckets)
                lists[key] = [a + b for a, b in zip(before, numbers, strict=True)]

    def series(self, name: str | None) -> views.UsageSeries:
        return views.UsageSeries(
            name=name,
            slot_hours=self._hours("slot_seconds"),
            cpu_hours=self._hours("cpu_seconds"),
            gpu_hours=self._hours("gpu_seconds"),
            measured_gpu_hours=self._hours("gpu_measured_s"),
            idle_gpu_hours=self._hours("gpu_idle_s"),
            costs=[
                views.UsageCost(currency=currency, amounts=[_shown(each) for each in amounts])
                for currency, amounts in sorted(self.costs.items())
            ],
            num_started=self._counts("num_started"),
            num_succeeded=self._counts("num_succeeded"),
            num_failed=self._counts("num_failed"),
            num_cancelled=self._counts("num_cancelled"),
        )

    def _hours(self, name: str) -> list[float]:
        return [_shown(each / 3600) for each in self._list(name)]

    def _counts(self, name: str) -> list[int]:
        return [int(each) for each in self._list(name)]

    def _list(self, name: str) -> Sequence[float]:
        return self.of.get(name) or [0] * self.num_buckets


def _shown(amount: float) -> float:
    """Round to the precision with which amounts are shown, so that a response is short."""
    return round(amount, 6)


class UsageReports:
    """Reports of the usage, read from the database."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock or database.clock

    async def report(
        self,
        caller: Caller,
        *,
        per: Per = "day",
        by: By | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        time_zone: str = "UTC",
    ) -> views.UsageReport:
        """Return the usage in the hours or days that contain any of the time from `since` to
        `until`, which default to the last 24 hours or 7 days.

        Raises InvalidParameter if the time is too long, too early, or in the future, or if there is
        no such time zone.
        """
        now = self._clock()
        buckets = _buckets(now, per, since, until, time_zone)

        def work(session: Session) -> views.UsageReport:
            found = _amounts(session, buckets, by, caller)
            total = _SeriesAmounts(len(buckets))
            for amounts in found.values():
                total.join(amounts)
            return views.UsageReport(
                since=buckets.starts[0],
                until=buckets.until,
                per=per,
                by=by,
                time_zone=time_zone,
                starts=buckets.starts,
                total=total.series(None),
                series=[] if by is None else _series(found, len(buckets)),
                capacity=_capacity(repository.capacity(session, buckets), len(buckets)),
                waits=_waits(repository.waits(session, buckets), len(buckets)),
            )

        return await self._database.read(work)


def _buckets(
    now: datetime, per: Per, since: datetime | None, until: datetime | None, time_zone: str
) -> UsageBuckets:
    try:
        zone = zone_named(time_zone)
    except ValueError as error:
        raise _refused("time_zone", str(error), "use UTC or a name such as Europe/Berlin") from None
    last = now if until is None else min(until, now)
    first = last - timedelta(days=DEFAULT_DAYS[per]) if since is None else since
    if first.year < FIRST_YEAR or last.year < FIRST_YEAR:
        where = "until" if since is None else "since"
        hint = f"use a time from {FIRST_YEAR} on"
        raise _refused(where, f"`{where}` is before the year {FIRST_YEAR}", hint)
    if first >= last:
        message = "`since` must be before `until` and before the current time"
        raise _refused("since", message, "use an earlier `since`")
    if last - first > timedelta(days=MAX_DAYS[per]):
        message = f"a report per {per} covers at most {MAX_DAYS[per]} days"
        hint = "use a later `since`" + (", or `per=day`" if per == "hour" else "")
        raise _refused("since", message, hint)
    return UsageBuckets.of(first, last, per, zone)


def _refused(parameter: str, message: str, hint: str) -> InvalidParameter:
    return InvalidParameter(message, pointer=f"/{parameter}", hint=hint)


def _amounts(
    session: Session, buckets: UsageBuckets, by: By | None, caller: Caller
) -> dict[str, _SeriesAmounts]:
    """Return the amounts of each user or queue. The sum of other users has an empty name."""
    column = {"user": "owner", "queue": "queue", None: None}[by]
    owner = None if caller.is_admin else caller.name
    found: dict[str, _SeriesAmounts] = defaultdict(lambda: _SeriesAmounts(len(buckets)))
    for row in repository.totals(session, buckets, column, owner):
        fields: Sequence[Any] = row
        bucket, name, currency, *numbers = fields
        amounts = found[name]
        for of, amount in zip(AMOUNTS, numbers, strict=True):
            if amount:
                amounts.add(bucket, of, currency, amount)
    for row in repository.live(session):
        name = "" if column is None else getattr(row, column)
        if column == "owner" and owner not in (None, name):
            name = ""
        _add_live(found[name], row, buckets)
    return found


def _add_live(amounts: _SeriesAmounts, row: Row[Any], buckets: UsageBuckets) -> None:
    """Add what an attempt that has not ended has used up to its latest report."""
    if row.held_until is not None:
        shares = SlotHistory(row.started_at, row.held_until, row.sizes).shares(buckets.bounds)
        for name, amount in slots_of(row).items() if shares else ():
            for bucket, share in shares.items():
                amounts.add(bucket, name, "", share * amount)
    if row.currency is not None:
        history = SlotHistory(row.cost_since, row.cost_until, row.cost_sizes)
        for bucket, share in history.shares(buckets.bounds).items():
            amounts.add(bucket, "cost", row.currency, share * row.total)


def _series(found: Mapping[str, _SeriesAmounts], num_buckets: int) -> list[views.UsageSeries]:
    named = sorted(
        (name for name in found if name), key=lambda name: (-found[name].slot_seconds, name)
    )
    others = _SeriesAmounts(num_buckets)
    rest = [*named[MAX_SERIES:], *(name for name in found if not name)]
    for name in rest:
        others.join(found[name])
    series = [found[name].series(name) for name in named[:MAX_SERIES]]
    return [*series, others.series(None)] if rest else series


def _capacity(rows: Sequence[Row[Any]], num_buckets: int) -> views.CapacitySeries:
    of = {row.bucket: row for row in rows}

    def numbers(name: str, unit: float) -> list[float]:
        return [_shown(getattr(of[n], name) / unit) if n in of else 0.0 for n in range(num_buckets)]

    return views.CapacitySeries(
        measured_s=numbers("measured_s", 1.0),
        cpu_hours=numbers("cpu_seconds", 3600.0),
        gpu_hours=numbers("gpu_seconds", 3600.0),
    )


def _waits(rows: Sequence[Row[Any]], num_buckets: int) -> list[views.WaitSeries]:
    hours: dict[str, list[float]] = defaultdict(lambda: [0.0] * num_buckets)
    for row in rows:
        hours[row.code][row.bucket] = _shown(row.job_seconds / 3600)
    ordered = sorted(hours.items(), key=lambda item: (-sum(item[1]), item[0]))
    return [views.WaitSeries(code=code, job_hours=numbers) for code, numbers in ordered]
