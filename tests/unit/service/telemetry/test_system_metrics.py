"""System metrics: stored when they arrive, joined, limited, and read by rank over time."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ray_workers.shared.contracts import Cause, FrameKind
from ray_workers.shared.supervisor_frames import SystemMetricsColumns, SystemMetricsReport
from service.db.models import SystemMetricsRow
from service.domain.errors import NotFound
from service.domain.system_metrics import (
    LONE_SAMPLES,
    MAX_SAMPLES,
    RANKS_OF_ROW,
    SAMPLES_OF_ROW,
)
from service.telemetry import system_metrics
from service.telemetry.known_attempts import KnownAttempt, KnownAttempts
from service.telemetry.series_filters import SystemMetricsFilter
from tests.marks import ON_SQLITE, SOAK
from tests.unit.service.helpers import START, Service, events_of, frame, metrics, told, used

CPU, NODE = "system/cpu", "system/node/cpu"


def num_rows(service: Service) -> int:
    query = select(func.count()).select_from(SystemMetricsRow)
    return service.database.read_sync(lambda s: s.scalar(query) or 0)


def sample(service: Service, job_id: str, attempt: int = 1, count: int = 1, **more: Any) -> None:
    """Report `count` samples, one every ten seconds. In sample n, n cores are used."""
    for _ in range(count):
        service.advance(10)
        number = (service.now - START).total_seconds() / 10
        service.report(job_id, attempt, [used(service.now, {CPU: number}, **more)])


def seconds(number: int) -> int:
    """Return the time of a sample."""
    return int(START.timestamp()) + 10 * number


async def test_samples_are_read_by_rank_over_time(service: Service) -> None:
    job_id = await service.running(resources={"num_workers": 2})
    service.advance(10)
    of_ranks = used(service.now, {CPU: 0.3}, ranks=(1,)), used(service.now, {NODE: 1.5})
    service.report(job_id, 1, of_ranks[:1])
    service.advance(10)
    service.report(job_id, 1, [*of_ranks[1:], used(service.now, {CPU: 2.5}, ranks=(1,))])
    one = await service.queries.system_metrics(job_id, SystemMetricsFilter(rank=1))
    assert one.series.keys() == {CPU}
    assert one.series[CPU].times == [seconds(1), seconds(2)]
    assert one.series[CPU].values == [0.3, 2.5]
    assert one.next_time == seconds(2)
    later = await service.queries.system_metrics(
        job_id, SystemMetricsFilter(rank=1, after_time=seconds(1))
    )
    assert later.series[CPU].times == [seconds(2)]
    others = SystemMetricsFilter(rank=1, keys=("other",))
    assert (await service.queries.system_metrics(job_id, others)).series == {}
    after = SystemMetricsFilter(rank=1, after_time=one.next_time)
    nothing = await service.queries.system_metrics(job_id, after)
    assert (nothing.series, nothing.next_time) == ({}, one.next_time)
    newest = await service.queries.newest_system_metrics(job_id)
    assert newest.time == seconds(2)
    assert [(r.rank, r.values) for r in newest.ranks] == [(1, {CPU: 2.5})]


async def test_they_are_no_metrics_of_the_job_and_start_nothing(service: Service) -> None:
    """Their axis is time, which would interfere with `after_step` for other metrics."""
    job_id = await service.submit()
    service.claim(job_id)
    sample(service, job_id)
    job = await service.jobs.get(job_id)
    assert job.summary == {}
    assert job.progress is None or job.progress.step == 0
    found = await service.queries.metrics(job_id)
    assert (found.series, found.next_step) == ({}, 0)


async def test_a_job_without_samples_has_none_and_no_job_is_not_found(service: Service) -> None:
    job_id = await service.submit()
    assert (await service.queries.system_metrics(job_id)).series == {}
    newest = await service.queries.newest_system_metrics(job_id)
    assert (newest.time, newest.ranks) == (None, [])
    for missing in ("job-none", "job\0"):
        with pytest.raises(NotFound):
            await service.queries.system_metrics(missing)
        with pytest.raises(NotFound):
            await service.queries.newest_system_metrics(missing)


async def test_lone_samples_are_joined_also_after_a_restart(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_metrics, "LONE_SAMPLES", 4)
    job_id = await service.running()
    sample(service, job_id, count=2)
    service.known = KnownAttempts()  # like a restart of the service
    sample(service, job_id)
    assert num_rows(service) == 3
    sample(service, job_id)
    assert num_rows(service) == 1
    sample(service, job_id)
    assert num_rows(service) == 2
    found = (await service.queries.system_metrics(job_id)).series[CPU]
    assert found.times == [seconds(n) for n in range(1, 6)]
    assert found.values == [1.0, 2.0, 3.0, 4.0, 5.0]


async def test_the_end_of_an_attempt_joins_what_there_is(service: Service) -> None:
    job_id = await service.running()
    sample(service, job_id, count=5)
    service.end(job_id, 1)
    assert num_rows(service) == 1
    assert len((await service.queries.system_metrics(job_id)).series[CPU].times) == 5
    assert (await service.queries.newest_system_metrics(job_id)).ranks[0].values == {CPU: 5.0}


@ON_SQLITE
async def test_however_long_a_job_runs_its_samples_are_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"LONE_SAMPLES": 4, "MAX_SAMPLES": 16, "SAMPLES_OF_ROW": 8}
    for name, value in limits.items():
        monkeypatch.setattr(system_metrics, name, value)
    job_id = await service.running()
    for number in range(7, 64, 7):
        sample(service, job_id, count=7)
        assert num_rows(service) <= 16 + 8
        found = (await service.queries.system_metrics(job_id)).series[CPU]
        assert min(number, 8) <= len(found.times) <= 16 + 8
        assert found.times[-1] == seconds(number), "the newest is there as it came"
        assert found.times == sorted(set(found.times))
        assert found.times[0] <= seconds(8)
    steps = [later - earlier for earlier, later in pairwise(found.values)]
    assert set(steps) <= {1.0, 2.0, 2.5, 4.0, 6.0, 8.0}, "means of the whole time"
    assert max(steps) >= 4.0


async def test_a_later_attempt_goes_on_in_time_whatever_its_step_and_clock(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(50, {"loss": 1.0})])
    sample(service, job_id, count=3)
    service.end(job_id, 1, Cause.NODE_LOST)
    service.advance(100)
    service.claim(job_id, 1)
    service.report(job_id, 2, [])
    # Before the attempt began, so the current time is used.
    sample(service, job_id, 2, clock_s=-3600)
    sample(service, job_id, 2, clock_s=3600)
    found = (await service.queries.system_metrics(job_id)).series[CPU]
    assert found.times == [seconds(n) for n in (1, 2, 3, 14, 15)]


async def test_ranks_far_apart_are_in_rows_of_their_own(service: Service) -> None:
    job_id = await service.running()
    service.advance(10)
    service.report(job_id, 1, [used(service.now, {CPU: 1.0}, ranks=range(512))])
    assert num_rows(service) == 512 // RANKS_OF_ROW
    last = await service.queries.system_metrics(job_id, SystemMetricsFilter(rank=511))
    assert last.series[CPU].values == [1.0]
    newest = await service.queries.newest_system_metrics(job_id)
    assert [one.rank for one in newest.ranks] == list(range(512))


async def test_they_go_with_their_job(service: Service) -> None:
    job_id = await service.running()
    sample(service, job_id, count=2)
    service.end(job_id, 1)
    await service.jobs.delete(job_id)
    await service.jobs.deletions.finish(before=service.now + timedelta(days=1))
    assert num_rows(service) == 0


GOOD: dict[str, Any] = {"time": seconds(1), "columns": [{"ranks": [0], "values": {CPU: [1.0]}}]}
BAD = [
    frame(FrameKind.SYSTEM_METRICS, GOOD),  # from a rank
    *(
        told(FrameKind.SYSTEM_METRICS, body)
        for body in (
            {},
            {**GOOD, "time": -1},
            {**GOOD, "columns": {}},
            {**GOOD, "columns": [{"ranks": [0]}]},
            {**GOOD, "columns": [{"ranks": [1, 0], "values": {CPU: [1.0, 1.0]}}]},
            {**GOOD, "columns": [{"ranks": [0, 1], "values": {CPU: [1.0]}}]},
            {**GOOD, "columns": [{"ranks": [0], "values": {"train/loss": [1.0]}}]},
            {**GOOD, "columns": [{"ranks": [0], "values": {CPU: [float("nan")]}}]},
            {**GOOD, "columns": [{"ranks": [0], "values": {CPU: [-1.0]}}]},
            {**GOOD, "columns": [{"ranks": [0], "values": {CPU: [1e39]}}]},
            {**GOOD, "columns": [{"ranks": [0], "values": {CPU: ["1"]}}]},
            {
                **GOOD,
                "columns": [{"ranks": [0], "values": {f"system/{n}": [1] for n in range(101)}}],
            },
        )
    ),
]


@ON_SQLITE
async def test_what_no_supervisor_measures_is_refused(service: Service) -> None:
    job_id = await service.running()
    service.advance(10)
    for bad in BAD:
        service.report(job_id, 1, [bad])
    (refused,) = await events_of(service, job_id, "frames_refused")
    assert "system_metrics" in refused.message
    assert num_rows(service) == 0


@SOAK
async def test_the_limits_hold_for_a_day_of_samples(service: Service) -> None:
    job_id = await service.running()
    columns = [SystemMetricsColumns([0, 1], {CPU: [1.0, 2.0]})]
    known = KnownAttempt()

    def store_all(session: Session) -> None:
        for number in range(8640):
            report = SystemMetricsReport(seconds(number), columns)
            system_metrics.store(session, job_id, report.time, report, known)

    service.database.write_sync(store_all)
    every = SystemMetricsFilter(max_points=100_000)
    found = (await service.queries.system_metrics(job_id, every)).series[CPU]
    assert MAX_SAMPLES / 2 <= len(found.times) <= MAX_SAMPLES + LONE_SAMPLES
    assert num_rows(service) <= 2 * MAX_SAMPLES / SAMPLES_OF_ROW + LONE_SAMPLES
