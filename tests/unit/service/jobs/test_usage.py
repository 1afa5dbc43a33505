"""The usage over time, compared with a minute-by-minute count of what jobs did, with both
databases; and the GPUs that samples show to be idle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.contracts import AttemptSpec, Cause, Frame, Slice
from service.db.repositories import jobs as jobs_repository
from service.db.session import Database
from service.domain.callers import Caller
from service.domain.errors import InvalidParameter
from service.jobs.idle_gpus import IdleGpuSearch
from service.jobs.usage import MAX_SERIES, UsageReports
from service.lifecycle import claims
from service.storage.storage import Storage
from service.telemetry import system_metrics
from tests.seeds import drawn
from tests.unit.service.helpers import START, Recorded, Service, spec, used
from tests.unit.service.jobs.test_accounting import MINUTE, Jobs

ADMIN, ANN = Caller("root", is_admin=True), Caller("ann", is_admin=False)
# Times at which clocks change in one of the zones, or in none.
BEGINNINGS = (
    datetime(2026, 3, 28, 20, 17, tzinfo=UTC),
    datetime(2026, 10, 24, 19, 41, tzinfo=UTC),
    datetime(2026, 4, 4, 10, 5, tzinfo=UTC),
    datetime(2026, 12, 31, 12, 0, tzinfo=UTC),
)
ZONES = ("UTC", "Europe/Berlin", "Asia/Kathmandu", "Australia/Lord_Howe", "America/St_Johns")
GPU = "system/gpu/0/utilization"


class Users(Service):
    """Jobs of two users in two queues, and a record of what starts and ends."""

    seed = 0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.of: dict[str, tuple[str, str]] = {}
        """The owner and the queue of each job."""
        self.happened: list[tuple[datetime, str, str]] = []
        """(time, what, job)"""

    async def submit(self, **fields: Any) -> str:
        number = len(self.of) + self.seed
        owner, queue = ("ann", "bob")[number % 2], ("default", "night")[number % 3 % 2]
        fields = {**fields, "queue": queue, "max_retries": 0}
        job, _ = await self.jobs.submit(spec(**fields), owner=owner, project="vision")
        self.of[job.id] = owner, queue
        return job.id

    def claim(self, job_id: str, attempt_seen: int = 0, **more: Any) -> AttemptSpec | None:
        if attempt_seen == 0:
            self.happened.append((self.now, "num_started", job_id))
        return super().claim(job_id, attempt_seen, **more)

    def end(self, job_id: str, *arguments: Any, **more: Any) -> Recorded:
        recorded = super().end(job_id, *arguments, **more)
        self.note_end(job_id)
        return recorded

    def note_end(self, job_id: str) -> None:
        row = self.database.read_sync(lambda s: jobs_repository.get(s, job_id))
        assert row is not None
        if row.state.is_terminal:
            self.happened.append((self.now, f"num_{row.state.value.lower()}", job_id))


class LongJobs(Jobs):
    """Jobs that run for hours or days, and that can also fail or be cancelled."""

    def __init__(self, service: Users, seed: int) -> None:
        super().__init__(service, seed)
        self.users = service

    async def run(self) -> None:
        """Run for days, until at least one job is running."""
        for _ in range(40):
            await self.minute()
        while not self.live:
            await self.minute()

    async def minute(self) -> None:
        await super().minute()
        if self.waiting and self.random.random() < 0.1:
            job_id = next(iter(self.waiting))
            await self.service.jobs.cancel(job_id)
            self.users.note_end(job_id)
            del self.waiting[job_id]
        for _ in range(self.random.choice((0, 3, 40, 200))):
            for job_id, (_, size) in self.live.items():
                self.unreported[job_id].append((self.service.now, size))
            self.service.now += MINUTE

    def leave(self, job_id: str) -> None:
        if self.random.random() < 0.5:
            super().leave(job_id)
            return
        self.service.end(job_id, self.live[job_id][0], Cause.USER_ERROR)
        self.counted(job_id)
        del self.live[job_id]


@pytest.fixture
def users(database: Database, storage: Storage, tmp_path: Path) -> Users:
    path = tmp_path / "prices.json"
    rules = [{"resource": "CPU", "per_hour": 6.0}]
    path.write_text(json.dumps({"currency": "EUR", "prices": rules}))
    return Users(database, storage, tmp_path, prices_file=path)


async def report(service: Service, caller: Caller = ADMIN, **wanted: Any) -> views.UsageReport:
    return await UsageReports(service.database, clock=lambda: service.now).report(caller, **wanted)


def label(at: datetime, per: str, zone: ZoneInfo) -> Hashable:
    """Name the local hour or day of a time."""
    local = at.astimezone(zone)
    return local.date() if per == "day" else (local.date(), local.hour, local.utcoffset())


Count = dict[tuple[Hashable, str | None, str], float]


def counted(
    jobs: LongJobs, per: str, zone: ZoneInfo, name_of: Callable[[str], str | None]
) -> Count:
    """Add up minutes, costs and jobs by (hour or day, name, amount)."""
    found: Count = defaultdict(float)
    for amount, each, unit in (
        *(("slot_hours", jobs.held, 1 / 60), ("cpu_hours", jobs.held, 1 / 60)),
        ("EUR", jobs.charged, 6 / 60),
    ):
        for (job_id, _), minutes in each.items():
            for at, size in minutes:
                found[label(at, per, zone), name_of(job_id), amount] += unit * size
    for at, what, job_id in jobs.users.happened:
        found[label(at, per, zone), name_of(job_id), what] += 1
    return {key: value for key, value in found.items() if value}


def shown(report: views.UsageReport, series: Sequence[views.UsageSeries]) -> Count:
    zone, found = ZoneInfo(report.time_zone), {}
    names = ("slot_hours", "cpu_hours", "gpu_hours", "idle_gpu_hours", "measured_gpu_hours")
    names += ("num_started", "num_succeeded", "num_failed", "num_cancelled")
    for one in series:
        lists = {name: getattr(one, name) for name in names}
        lists |= {cost.currency: cost.amounts for cost in one.costs}
        for name, numbers in lists.items():
            for start, number in zip(report.starts, numbers, strict=True):
                if number:
                    found[label(start, report.per, zone), one.name, name] = number
    return found


@pytest.mark.parametrize("seed", drawn(2))
async def test_the_usage_is_that_of_a_count_by_minute(users: Users, seed: int) -> None:
    await users.queue("night")
    jobs = LongJobs(users, seed)
    users.seed, users.now = seed, BEGINNINGS[seed % len(BEGINNINGS)]
    begin = users.now
    await jobs.run()
    assert {what for _, what, _ in users.happened} > {"num_started", "num_succeeded"}
    of, span_s = users.of, (users.now - begin).total_seconds()
    total = counted(jobs, "day", ZoneInfo("UTC"), lambda _: None)
    assert sum(v for key, v in total.items() if key[2] == "slot_hours") > 24
    for _ in range(6):
        zone, per = ZoneInfo(jobs.random.choice(ZONES)), jobs.random.choice(("hour", "day"))
        since = begin + timedelta(seconds=jobs.random.uniform(-7200, 0.7 * span_s))
        until = since + timedelta(seconds=jobs.random.uniform(60, span_s))
        wanted = {"per": per, "since": since, "until": until, "time_zone": zone.key}
        found = await report(users, **wanted)
        assert found.starts[0] <= since < (*found.starts[1:], found.until)[0]
        assert found.starts[-1] < min(until, users.now) <= found.until
        labels = {label(start, per, zone) for start in found.starts}
        assert len(labels) == len(found.starts)

        def inside(all_of: Count) -> Count:
            return {key: n for key, n in all_of.items() if key[0] in labels}  # noqa: B023

        expected = inside(counted(jobs, per, zone, lambda _: None))
        assert shown(found, [found.total]) == pytest.approx(expected, rel=1e-6, abs=2e-6)
        by_user = await report(users, by="user", **wanted)
        expected = inside(counted(jobs, per, zone, lambda job_id: of[job_id][0]))
        assert shown(by_user, by_user.series) == pytest.approx(expected, rel=1e-6, abs=2e-6)
        by_queue = await report(users, ANN, by="queue", **wanted)
        expected = inside(counted(jobs, per, zone, lambda job_id: of[job_id][1]))
        assert shown(by_queue, by_queue.series) == pytest.approx(expected, rel=1e-6, abs=2e-6)
        own = await report(users, ANN, by="user", **wanted)
        expected = inside(
            counted(jobs, per, zone, lambda job_id: "ann" if of[job_id][0] == "ann" else None)
        )
        assert shown(own, own.series) == pytest.approx(expected, rel=1e-6, abs=2e-6)
        assert by_user.total == by_queue.total == own.total == found.total


async def test_days_have_23_or_25_hours_when_the_clocks_change(service: Service) -> None:
    service.now = datetime(2026, 11, 1, tzinfo=UTC)
    for first, hours in ((datetime(2026, 3, 29), 23), (datetime(2026, 10, 25), 25)):
        since = first.replace(tzinfo=UTC)
        found = await report(
            service, since=since, until=since + timedelta(days=1), time_zone="Europe/Berlin"
        )
        bounds = [*found.starts, found.until]
        assert (bounds[1] - bounds[0]).total_seconds() == 3600 * hours
        assert bounds[0].astimezone(ZoneInfo("Europe/Berlin")).hour == 0


async def test_many_users_are_shown_as_the_largest_and_the_sum_of_the_others(
    service: Service,
) -> None:
    for number in range(MAX_SERIES + 3):
        job, _ = await service.jobs.submit(spec(), owner=f"user{number:02}", project="p")
        service.claim(job.id)
        service.report(job.id, 1)
        service.advance(60 * (number + 1))
        service.end(job.id, 1)
    found = await report(service, by="user")
    names = [series.name for series in found.series]
    assert names == [*(f"user{n:02}" for n in range(MAX_SERIES + 2, 2, -1)), None]
    assert sum(found.series[-1].slot_hours) == pytest.approx((1 + 2 + 3) / 60)
    assert sum(found.series[-1].num_succeeded) == 3


@pytest.mark.parametrize(
    ("wanted", "parameter"),
    [
        ({"since": START - timedelta(days=367)}, "since"),
        ({"since": START - timedelta(days=32), "per": "hour"}, "since"),
        ({"since": START}, "since"),
        ({"since": START + timedelta(days=3), "until": START + timedelta(days=4)}, "since"),
        ({"since": datetime.min.replace(tzinfo=UTC), "until": START}, "since"),
        ({"until": datetime.min.replace(tzinfo=UTC) + timedelta(days=9)}, "until"),
        ({"time_zone": "Europe/Nowhere"}, "time_zone"),
        ({"time_zone": "../etc/passwd"}, "time_zone"),
        ({"time_zone": "x" * 1000}, "time_zone"),
    ],
)
async def test_a_bad_period_is_refused_with_a_fix(
    sqlite_service: Service, wanted: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        await report(sqlite_service, **wanted)
    assert refused.value.pointer == f"/{parameter}"
    assert refused.value.hint


async def test_a_period_that_ends_in_the_year_9999_ends_now(sqlite_service: Service) -> None:
    until = datetime.max.replace(tzinfo=UTC)
    found = await report(sqlite_service, since=START - timedelta(hours=1), until=until, per="hour")
    assert found.starts == [START - timedelta(hours=1)]


async def on_gpus(service: Service, num_gpus: int = 1, ranks: int = 1, **fields: Any) -> str:
    """Return a running job whose workers have GPUs."""
    job_id = await service.submit(resources={"num_workers": ranks}, **fields)
    bundle = {"CPU": 1.0, "GPU": float(num_gpus)}

    def work(session: Session) -> list[AttemptSpec | None]:
        wanted = claims.Wanted(job_id, 0, "default", (Slice("node-a", ranks),), bundle)
        return claims.claim(session, [wanted], service.deployment, service.now)

    assert service.database.write_sync(work) != [None]
    service.report(job_id, 1)
    return job_id


def sampled(service: Service, job_id: str, *uses: float, ranks: Sequence[int] = (0,)) -> None:
    """Report the utilization of the first GPU of each rank, every ten seconds."""
    for use in uses:
        service.advance(10)
        frames: list[Frame] = [used(service.now, {GPU: use}, ranks=ranks)]
        service.report(job_id, 1, frames)


async def idle_gpus(service: Service, min_idle_s: float = 60) -> views.IdleGpuReport:
    return await IdleGpuSearch(service.database, clock=lambda: service.now).report(min_idle_s)


async def test_gpus_that_are_not_used_are_listed_with_their_holder(service: Service) -> None:
    idle = await on_gpus(service, ranks=3)
    busy, unmeasured = await on_gpus(service), await on_gpus(service, 4)
    since = service.now
    for _ in range(9):
        service.advance(10)
        columns = used(service.now, {GPU: 0.01}, ranks=(0, 2)), used(service.now, {GPU: 0.9})
        service.report(idle, 1, [columns[0]])
        service.report(busy, 1, [columns[1]])
    found = await idle_gpus(service)
    (item,) = found.items
    assert (item.job_id, item.owner, item.ranks, item.num_idle, item.num_measured) == (
        *(idle, "ann", [0, 2], 2, 2),
    )
    assert item.idle_since == since + timedelta(seconds=10)
    assert [(one.job_id, one.num_gpus) for one in found.unmeasured] == [(unmeasured, 4.0)]
    assert (await idle_gpus(service, 600)).items == []
    sampled(service, idle, 0.5, ranks=(0, 2))
    sampled(service, idle, 0.0, ranks=(0, 2))
    assert (await idle_gpus(service)).items == [], "it was used 10 s ago"
    service.advance(600)
    found = await idle_gpus(service)
    assert {one.job_id for one in found.unmeasured} == {idle, busy, unmeasured}, "old samples"


async def test_ranks_of_different_rows_are_all_seen(service: Service) -> None:
    job_id = await on_gpus(service, ranks=130)
    sampled(service, job_id, *[0.0] * 8, ranks=range(130))
    (item,) = (await idle_gpus(service)).items
    assert item.num_idle == item.num_measured == 130


@pytest.mark.parametrize("num_samples", [system_metrics.LONE_SAMPLES + 7, 9])
async def test_idle_gpu_hours_are_those_of_the_samples(service: Service, num_samples: int) -> None:
    job_id = await on_gpus(service, ranks=2)
    uses = [0.0 if n % 3 else 0.7 for n in range(num_samples)]
    sampled(service, job_id, *uses, ranks=(0, 1))
    service.end(job_id, 1)
    found = await report(service, per="hour", by="queue")
    (series,) = found.series
    assert sum(series.gpu_hours) == pytest.approx(2 * num_samples / 360, abs=3e-6)
    assert sum(series.measured_gpu_hours) == pytest.approx(2 * num_samples / 360, abs=3e-6)
    idle = sum(1 for use in uses if use == 0.0)
    assert sum(series.idle_gpu_hours) == pytest.approx(2 * idle / 360, abs=3e-6)


async def test_time_without_samples_is_not_measured(service: Service) -> None:
    job_id = await on_gpus(service)
    sampled(service, job_id, 0.0, 0.0)
    service.advance(3600)
    sampled(service, job_id, 0.0, 0.0)
    service.end(job_id, 1)
    found = await report(service, per="hour", since=START - MINUTE)
    assert sum(found.total.gpu_hours) == pytest.approx(3640 / 3600, abs=3e-6)
    assert sum(found.total.idle_gpu_hours) == pytest.approx(30 / 3600, abs=3e-6)


async def test_one_late_sample_does_not_hide_the_others(service: Service) -> None:
    job_id = await on_gpus(service)
    sampled(service, job_id, 0.0, 0.0)
    for wait_s in (18, 2, 10, 10, 10):
        service.advance(wait_s - 10)
        sampled(service, job_id, 0.0)
    service.end(job_id, 1)
    found = await report(service, per="hour", since=START - MINUTE)
    assert sum(found.total.idle_gpu_hours) == pytest.approx(70 / 3600, abs=3e-6)
