"""The times of cron expressions, compared with a loop over all minutes that shares no code with
them, on the days on which clocks change and on others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from service.domain.schedules import cron as cron_times
from service.domain.schedules.cron import BadCron, Cron

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
ZONES = (
    *("Europe/Berlin", "America/New_York", "America/Santiago", "Africa/Casablanca", "Asia/Tokyo"),
    "Australia/Lord_Howe",  # half an hour
    "America/Havana",  # at midnight
    "Africa/Cairo",  # at midnight
    "Antarctica/Troll",  # two hours
    "Asia/Kathmandu",  # +05:45
    "UTC",
)
MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


class Slow:
    """Matches the fields of an expression minute by minute."""

    def __init__(self, expression: str, zone: ZoneInfo) -> None:
        minute, hour, day, month, weekday = expression.split()
        self.zone = zone
        self.minutes, self.hours = self._values(minute, 0, 59), self._values(hour, 0, 23)
        self.days, self.months = self._values(day, 1, 31), self._values(month, 1, 12)
        self.weekdays = {value % 7 for value in self._values(weekday, 0, 7)}
        self.needs_both = day.startswith("*") or weekday.startswith("*")
        self.is_interval = minute.startswith("*") or hour.startswith("*")

    @staticmethod
    def _values(field: str, low: int, high: int) -> set[int]:
        found: set[int] = set()
        for part in field.split(","):
            span, _, step = part.partition("/")
            for names, first in ((MONTHS, 1), (DAYS, 0)):
                for number, name in enumerate(names, first):
                    span = span.replace(name, str(number))
            if span == "*":
                begin, end = low, high
            elif "-" in span:
                begin, end = (int(bound) for bound in span.split("-"))
            else:
                begin, end = int(span), high if step else int(span)
            found.update(range(begin, end + 1, int(step or 1)))
        return found

    def _matches(self, local: datetime) -> bool:
        on_day, on_weekday = local.day in self.days, local.isoweekday() % 7 in self.weekdays
        is_day = on_day and on_weekday if self.needs_both else on_day or on_weekday
        return (
            local.minute in self.minutes
            and local.hour in self.hours
            and local.month in self.months
            and is_day
        )

    def between(self, start: datetime, end: datetime) -> list[datetime]:
        """All times later than `start` and at most `end`."""
        shown: dict[datetime, datetime] = {}  # the first moment at which clocks show a time
        found: set[datetime] = set()
        previous: datetime | None = None
        moment = start - DAY
        while moment <= end:
            local = moment.astimezone(self.zone).replace(tzinfo=None)
            if self.is_interval:
                found |= {moment} if self._matches(local) else set()
            elif local not in shown:
                skipped = local if previous is None or local <= previous else previous + MINUTE
                while skipped <= local:
                    found |= {moment} if self._matches(skipped) else set()
                    skipped += MINUTE
            shown.setdefault(local, moment)
            previous = max(local, previous or local)
            moment += MINUTE
        return sorted(time for time in found if start < time <= end)


def changes(zone: ZoneInfo, year: int) -> list[datetime]:
    """The hours in which the zone's clocks change in a year."""
    hours = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(365 * 24)]
    offsets = [hour.astimezone(zone).utcoffset() for hour in hours]
    return [hours[n] for n in range(1, len(hours)) if offsets[n] != offsets[n - 1]]


def expressions(rng: random.Random) -> Iterator[str]:
    def one(low: int, high: int, steps: tuple[int, ...]) -> str:
        first, second = sorted(rng.sample(range(low, high + 1), k=2))  # cronsim reads 4-4/2 as 4/2
        step = rng.choice(steps)
        return rng.choice(
            (
                *("*", f"*/{step}", f"{first}", f"{first},{second}", f"{first}-{second}"),
                *(f"{first}-{second}/{step}", f"{first}/{step}"),
            )
        )

    while True:
        day, month, weekday = "*", "*", "*"
        if rng.random() < 0.3:
            day = one(1, 28, (2, 10))
        if rng.random() < 0.2:
            month = rng.choice((one(1, 12, (2, 3)), rng.choice(MONTHS)))
        if rng.random() < 0.3:
            weekday = rng.choice((one(0, 7, (2, 3)), rng.choice(DAYS), "MON-FRI"))
        hour = rng.choice((one(0, 4, (2, 3)), one(0, 23, (2, 5))))
        yield f"{one(0, 59, (7, 10, 30))} {hour} {day} {month} {weekday}"


def one_case(seed: int) -> None:
    rng = random.Random(seed)
    zone = ZoneInfo(rng.choice(ZONES))
    year = rng.randrange(2020, 2036)
    near = changes(zone, year) if rng.random() < 0.8 else []
    day = rng.choice(near or [datetime(year, rng.randrange(1, 13), 1, tzinfo=UTC)])
    start = day - MINUTE * rng.randrange(36 * 60)
    end = start + timedelta(days=rng.choice((1, 2, 3)))
    expression = next(expressions(rng))
    cron, slow = Cron(expression, zone), Slow(expression, zone)
    wanted = slow.between(start, end)
    case = f"{expression!r} in {zone.key}, {start}"
    found = []
    for time in cron.times_after(start):
        if time > end:
            break
        found.append(time)
    assert found == wanted, case
    if wanted:  # from any moment, the next time is the same
        at = start + (end - start) * rng.random()
        later = [time for time in wanted if time > at]
        assert not later or cron.next_after(at) == later[0], f"{case} from {at}"
        most = rng.choice((1, 3, 50))
        assert cron.latest(start, end, most) == wanted[-most:], case


@pytest.mark.parametrize("part", range(4))
def test_times_equal_those_of_a_loop_over_all_minutes(part: int) -> None:
    for seed in range(part * 25, part * 25 + 25):
        one_case(seed)


@pytest.mark.parametrize(
    ("expression", "after", "times"),
    [
        # Clocks skip 02:00 to 03:00 on 28 March 2027, and show 02:00 to 03:00 twice on 31 October.
        ("30 2 * * *", "2027-03-27T12:00", ["2027-03-28T03:00+02:00", "2027-03-29T02:30+02:00"]),
        ("30 2 * * *", "2027-10-30T12:00", ["2027-10-31T02:30+02:00", "2027-11-01T02:30+01:00"]),
        ("*/30 2 * * *", "2027-03-27T12:00", ["2027-03-29T02:00+02:00"]),
        (
            "*/30 2 * * *",
            "2027-10-30T12:00",
            [
                *("2027-10-31T02:00+02:00", "2027-10-31T02:30+02:00"),
                *("2027-10-31T02:00+01:00", "2027-10-31T02:30+01:00"),
            ],
        ),
        ("0 0 29 2 *", "2027-10-30T12:00", ["2028-02-29T00:00+01:00", "2032-02-29T00:00+01:00"]),
        ("@weekly", "2027-03-20T12:00", ["2027-03-21T00:00+01:00", "2027-03-28T00:00+01:00"]),
        ("0 8 * * mon#1", "2027-03-20T12:00", ["2027-04-05T08:00+02:00"]),
        ("0 8 L * *", "2027-02-20T12:00", ["2027-02-28T08:00+01:00"]),
        ("* 3 29 2 *", "2027-10-30T12:00", ["2028-02-29T03:00+01:00", "2028-02-29T03:01+01:00"]),
    ],
)
def test_times_on_days_on_which_clocks_change(
    expression: str, after: str, times: list[str]
) -> None:
    cron = Cron(expression, ZoneInfo("Europe/Berlin"))
    found = islice(cron.times_after(datetime.fromisoformat(f"{after}+00:00")), len(times))
    assert list(found) == [datetime.fromisoformat(time) for time in times]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("0 30 2 * * *", "seconds can't be set"),
        ("@reboot", "'@reboot' is not a predefined schedule"),
        ("0 0 30 2 *", "bad day-of-month"),
        ("60 * * * *", "bad minute"),
        ("0 24 * * *", "bad hour"),
        ("5-1 * * * *", "bad minute"),
        ("*/0 * * * *", "bad minute"),
        ("0 0 * * mond", "bad day-of-week"),
        ("0 0 * * ①", "not ASCII"),
        (f"{','.join(['1'] * 200)} * * * *", "longer than 256"),
    ],
)
def test_a_bad_expression_is_refused_with_the_field(expression: str, problem: str) -> None:
    with pytest.raises(BadCron, match=problem) as raised:
        Cron(expression, UTC)
    assert raised.value.hint


def test_there_is_no_time_after_the_last_year_and_none_that_no_calendar_has() -> None:
    assert Cron("0 0 * * *", UTC).next_after(datetime(9999, 12, 31, tzinfo=UTC)) is None
    in_tokyo = Cron("0 0 * * *", ZoneInfo("Asia/Tokyo"))
    assert in_tokyo.next_after(datetime.max.replace(tzinfo=UTC)) is None
    never = Cron("0 0 */31 * mon#3", UTC)
    assert never.next_after(datetime(2027, 1, 1, tzinfo=UTC)) is None


def test_the_latest_times_of_a_thousand_years_are_found_at_once() -> None:
    start, end = datetime(2027, 1, 1, tzinfo=UTC), datetime(3027, 1, 1, tzinfo=UTC)
    every_minute = Cron("* * * * *", ZoneInfo("Europe/Berlin")).latest(start, end, 101)
    assert every_minute == [end - MINUTE * n for n in reversed(range(101))]
    leap = Cron("0 0 29 2 *", UTC).latest(start, end, 3)
    assert [time.year for time in leap] == [3016, 3020, 3024]


def test_leap_days_are_found_but_no_time_that_is_more_than_ten_years_away() -> None:
    leap = Cron("0 0 29 2 *", UTC)
    assert leap.next_after(datetime(2096, 3, 1, tzinfo=UTC)) == datetime(2104, 2, 29, tzinfo=UTC)
    for expression, first in (
        ("*/100 0 */100,29 2 THU#5", "2052-02-29T00:00+00:00"),
        ("30 0 * 2 THU#5", "2052-02-29T00:30+00:00"),
    ):
        cron = Cron(expression, ZoneInfo("Africa/Casablanca"))
        wanted = datetime.fromisoformat(first)
        assert cron.next_after(datetime(2026, 11, 30, tzinfo=UTC)) is None
        found = cron.next_after(wanted - timedelta(days=3650))
        assert found is not None
        assert abs(found - wanted) <= timedelta(hours=1), expression  # the zone's offset


def test_the_search_ends_if_clocks_skip_every_matching_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = []
    search = cron_times._NextTime

    def counted(*given: Any) -> Any:
        searches.append(given)
        return search(*given)

    monkeypatch.setattr(cron_times, "_NextTime", counted)
    cron = Cron("*/30 2 8-14 3 */7", ZoneInfo("America/New_York"))  # the second Sunday of March
    assert cron.next_after(datetime(2026, 11, 30, tzinfo=UTC)) is None
    assert 10 <= len(searches) <= 12, "one per year"
