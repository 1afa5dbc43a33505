"""Forecasts are stored once, updated when they change, and evaluated when the event happens."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ray_workers.shared.contracts import Cause, Phase
from service.db.repositories.scheduling import forecasts as repository
from service.db.repositories.scheduling.forecasts import ForecastOf
from service.domain.scheduling.outlook.simulation import Expected
from service.domain.scheduling.rules.obstacles import Reason
from service.outlook import forecasts
from service.outlook.forecasts import Forecasts
from tests.unit.service.helpers import START, Service, metrics


@pytest.fixture(autouse=True)
def one_clock(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the test's time for explanations."""
    monkeypatch.setattr(service.database, "time", lambda _: service.now)


def store(
    service: Service,
    of: Forecasts,
    starts: dict[str, Expected] | None = None,
    ends: dict[str, Expected] | None = None,
) -> int:
    """Run one round of the forecaster, and return the number of forecasts that it stored."""
    service.database.read_sync(of.load)
    known = service.database.read_sync(forecasts.facts)
    number = 0
    for changes in of.changes(known, starts or {}, ends or {}, service.now):
        service.database.write_sync(lambda s, c=changes: of.store(s, c, service.now))
        of.stored(changes)
        number += len(changes)
    service.database.write_sync(repository.settle)
    return number


def in_(service: Service, seconds: float) -> Expected:
    return Expected(service.now + timedelta(seconds=seconds))


def errors(service: Service) -> dict[str, float | None]:
    found = service.database.read_sync(lambda s: forecasts.errors(s, service.now))
    return {"count": found.starts.count, "s": found.starts.median_s, "p90": found.starts.p90_s}


async def test_the_first_forecast_is_measured_and_the_newest_is_told(service: Service) -> None:
    of = Forecasts()
    job_id = await service.submit()
    first = in_(service, 600)
    assert store(service, of, {job_id: first}) == 1
    service.advance(100)
    assert store(service, of, {job_id: in_(service, 200)}) == 1
    told = await service.queries.explain(job_id)
    assert told.start is not None
    assert told.start.first_at == first.at
    assert told.expected_start_at == service.now + timedelta(seconds=200)
    service.advance(450)
    service.claim(job_id)
    store(service, of)
    assert errors(service) == {"count": 1, "s": 50.0, "p90": 50.0}


async def test_a_forecast_that_is_about_the_same_is_not_written_again(service: Service) -> None:
    of = Forecasts()
    job_id = await service.submit()
    assert store(service, of, {job_id: in_(service, 1000)}) == 1
    assert store(service, of, {job_id: in_(service, 1030)}) == 0
    assert store(service, of, {job_id: in_(service, 1060)}) == 1
    nobody_knows = Expected(None, Reason("held", "is held"), service.now)
    assert store(service, of, {job_id: nobody_knows}) == 1
    assert store(service, of, {job_id: nobody_knows}) == 0
    told = await service.queries.explain(job_id)
    assert told.start is not None
    assert told.start.reason is not None
    assert (told.start.at, told.start.reason.code) == (None, "held")
    assert told.start.not_before == service.now
    assert told.start.first_at == service.now + timedelta(seconds=1000)


async def test_a_job_that_one_round_does_not_see_keeps_its_forecast(service: Service) -> None:
    of = Forecasts()
    waiting, running = await service.submit(), await service.running()
    starts, ends = {waiting: in_(service, 1000)}, {running: in_(service, 500)}
    assert store(service, of, starts, ends) == 2
    assert store(service, of) == 0
    assert store(service, of, starts, ends) == 0
    later = {running: in_(service, 5000)}
    assert store(service, of, starts, later) == 1
    (stored,) = [
        row for row in service.database.read_sync(repository.still_open) if row.job_id == running
    ]
    assert stored.expected_at == later[running].at


async def test_a_start_whose_time_has_passed_is_not_shown(service: Service) -> None:
    job_id = await service.submit()
    at, latest = (service.now + timedelta(seconds=seconds) for seconds in (100, 200))
    store(service, Forecasts(), {job_id: Expected(at, earliest=service.now, latest=latest)})
    service.advance(150)
    start = (await service.queries.explain(job_id)).start
    assert start is not None
    assert (start.earliest_at, start.at, start.latest_at) == (service.now, service.now, latest)
    service.advance(50)
    start = (await service.queries.explain(job_id)).start
    assert start is not None
    assert start.reason is not None
    assert (start.at, start.latest_at, start.reason.code) == (None, None, "overdue")


async def test_all_answers_about_a_job_have_the_same_end(service: Service) -> None:
    job_id = await service.running()
    end = (await service.queries.explain(job_id)).end
    assert end is not None
    assert end.reason is not None
    assert (end.at, end.reason.message) == (
        None,
        "the job does not report its total number of steps",
    )
    for step in range(1, 11):
        service.advance(10)
        service.report(job_id, 1, [metrics(step, {"x": 1.0}, at=service.now, total_steps=100)])
    end = (await service.queries.explain(job_id)).end
    assert end is not None
    assert end.earliest_at is not None
    assert end.latest_at is not None
    assert end.earliest_at < service.now + timedelta(seconds=900) < end.latest_at
    listed = (await service.jobs.list()).items[0].progress
    for progress in ((await service.jobs.get(job_id)).progress, listed):
        assert progress is not None
        found = progress.earliest_end_at, progress.latest_end_at
        assert found == (end.earliest_at, end.latest_at)


async def test_a_time_limit_is_the_latest_end(service: Service) -> None:
    job_id = await service.running(max_runtime_s=200)
    for step in range(1, 11):
        service.advance(10)
        service.report(job_id, 1, [metrics(step, {"x": 1.0}, at=service.now, total_steps=100)])
    progress = (await service.jobs.get(job_id)).progress
    assert progress is not None
    assert progress.latest_end_at == START + timedelta(seconds=200)


async def test_another_process_goes_on_with_what_is_stored(service: Service) -> None:
    job_id = await service.submit()
    assert store(service, Forecasts(), {job_id: in_(service, 1000)}) == 1
    of = Forecasts()
    assert store(service, of, {job_id: in_(service, 1000)}) == 0
    assert store(service, of, {job_id: in_(service, 2000)}) == 1


async def test_the_end_of_a_job_that_succeeds_is_measured_and_no_other(service: Service) -> None:
    of = Forecasts()
    good, bad, goes_on = [await service.running(max_retries=0) for _ in range(3)]
    ends = {job_id: in_(service, 100) for job_id in (good, bad, goes_on)}
    assert store(service, of, ends=ends) == 3
    assert (await service.queries.explain(good)).start is None
    service.advance(130)
    service.end(good, 1)
    service.end(bad, 1, Cause.USER_ERROR)
    store(service, of, ends={goes_on: ends[goes_on]})
    found = service.database.read_sync(lambda s: forecasts.errors(s, service.now))
    assert (found.ends.count, found.ends.median_s) == (1, pytest.approx(30.0))
    left = service.database.read_sync(repository.still_open)
    assert [row.job_id for row in left] == [goes_on]


async def test_each_attempt_of_a_job_has_its_own_forecasts(service: Service) -> None:
    of = Forecasts()
    job_id = await service.submit()
    store(service, of, {job_id: in_(service, 10)})
    service.advance(10)
    service.claim(job_id)
    service.report(job_id, 1, phase=Phase.RUNNING)
    store(service, of)
    service.end(job_id, 1, Cause.PREEMPTED)
    store(service, of, {job_id: in_(service, 50)})
    service.advance(20)
    service.claim(job_id, 1)
    store(service, of)
    assert errors(service) == {"count": 2, "s": 15.0, "p90": 30.0}


async def test_forecasts_of_jobs_that_are_cancelled_or_gone_are_dropped(service: Service) -> None:
    of = Forecasts()
    cancelled, gone = await service.submit(), await service.submit()
    known = service.database.read_sync(forecasts.facts)
    service.database.read_sync(of.load)
    for job_id in (cancelled, gone):
        await service.jobs.cancel(job_id)
    await service.jobs.delete(gone)
    starts = {job_id: in_(service, 10) for job_id in (cancelled, gone)}
    (changes,) = of.changes(known, starts, {}, service.now)
    service.database.write_sync(lambda s: of.store(s, changes, service.now))
    service.database.write_sync(repository.settle)
    assert service.database.read_sync(repository.still_open) == []
    assert errors(service)["count"] == 0


async def test_a_forecast_that_was_made_after_its_event_does_not_count(service: Service) -> None:
    of = Forecasts()
    job_id = await service.submit()
    known = service.database.read_sync(forecasts.facts)
    service.database.read_sync(of.load)
    service.claim(job_id)
    service.advance(5)
    (changes,) = of.changes(known, {job_id: in_(service, 10)}, {}, service.now)
    service.database.write_sync(lambda s: of.store(s, changes, service.now))
    service.database.write_sync(repository.settle)
    assert errors(service)["count"] == 0


async def test_jobs_of_unknown_length_are_assumed_to_be_as_long_as_others_were(
    service: Service,
) -> None:
    for seconds in (10, 30, 500):
        job_id = await service.running()
        service.advance(seconds)
        service.end(job_id, 1)
    limited = await service.submit(max_runtime_s=60)
    known = service.database.read_sync(forecasts.facts)
    assert known.usual_s == pytest.approx(30.0)
    row = service.database.read_sync(lambda s: repository.of_job(s, limited, 1, ForecastOf.START))
    assert row is None
