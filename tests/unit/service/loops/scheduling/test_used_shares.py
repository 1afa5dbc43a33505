"""The cluster usage of users in queues, computed from the attempts in the database."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ray_workers.shared.contracts import Cause
from service.db.repositories.scheduling import accounting
from service.domain.scheduling.rules.shares import HALF_LIFE_S
from service.loops.scheduling.used_shares import UsedShares
from service.loops.shared import queue_view
from service.outlook import step_times
from service.outlook.step_times import EarlierRuns, Kind
from tests.unit.service.helpers import Service

TOTAL = {"CPU": 8.0}


def used(service: Service, of: UsedShares) -> dict[tuple[str, str], float]:
    _, live = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    return service.database.read_sync(lambda s: of.get(s, service.now, live, TOTAL))


async def test_what_lives_and_what_has_ended_counts_by_its_share(service: Service) -> None:
    shares = UsedShares()
    assert used(service, shares) == {}
    job_id = await service.running()
    service.now += timedelta(seconds=80)
    (account,) = used(service, shares)
    assert used(service, shares) == {account: pytest.approx(10.0)}
    service.end(job_id, 1, Cause.SUCCEEDED)
    for of in (shares, shares, UsedShares()):
        assert used(service, of) == {account: pytest.approx(10.0, rel=1e-3)}, "once"
    service.now += timedelta(seconds=HALF_LIFE_S)
    assert used(service, shares) == {account: pytest.approx(5.0, rel=1e-3)}


async def test_a_clock_that_is_set_back_makes_no_use_negative(service: Service) -> None:
    shares = UsedShares()
    job_id = await service.running()
    service.now -= timedelta(hours=1)
    assert list(used(service, shares).values()) == [0.0]
    service.end(job_id, 1, Cause.SUCCEEDED)
    for of in (shares, UsedShares()):
        assert all(seconds >= 0.0 for seconds in used(service, of).values())


async def test_the_use_of_deleted_jobs_is_not_forgotten_by_a_new_leader(
    service: Service,
) -> None:
    shares = UsedShares()
    job_id = await service.running()
    shares.claimed([(job_id, 1)])
    service.now += timedelta(seconds=80)
    service.end(job_id, 1, Cause.SUCCEEDED)
    before = used(service, shares)
    assert before
    await service.jobs.delete(job_id)
    assert used(service, shares) == pytest.approx(before, rel=1e-3), "once"
    assert used(service, UsedShares()) == pytest.approx(before, rel=1e-3)
    service.now += timedelta(seconds=1)
    service.database.write_sync(lambda s: accounting.forget(s, service.now))
    assert used(service, UsedShares()) == {}


async def test_the_use_of_a_job_that_is_deleted_before_its_end_was_read_counts(
    service: Service,
) -> None:
    shares = UsedShares()
    assert used(service, shares) == {}
    job_id = await service.running()
    shares.claimed([(job_id, 1)])
    service.now += timedelta(seconds=80)
    service.end(job_id, 1, Cause.SUCCEEDED)
    await service.jobs.delete(job_id)
    assert list(used(service, shares).values()) == [pytest.approx(10.0, rel=1e-3)]


async def test_an_attempt_that_ends_before_it_was_seen_alive_counts(service: Service) -> None:
    shares = UsedShares()
    assert used(service, shares) == {}
    job_id = await service.running()
    shares.claimed([(job_id, 1)])
    service.now += timedelta(seconds=80)
    service.end(job_id, 1, Cause.SUCCEEDED)
    for _ in range(2):
        assert list(used(service, shares).values()) == [pytest.approx(10.0, rel=1e-3)], "once"


async def test_earlier_runs_are_those_of_succeeded_jobs_of_a_kind(service: Service) -> None:
    runs = EarlierRuns()

    def known() -> dict[Kind, list[float]]:
        found = service.database.read_sync(lambda s: runs.get(s, service.now))
        return {kind: list(times) for kind, times in found.items()}

    assert known() == {}
    for seconds, cause in ((30, Cause.SUCCEEDED), (50, Cause.USER_ERROR), (40, Cause.SUCCEEDED)):
        job_id = await service.running(max_retries=0)
        service.now += timedelta(seconds=seconds)
        service.end(job_id, 1, cause)
    service.now += step_times.FRESH_FOR
    (found,) = known().items()
    assert found[0].num_workers == 1
    assert found[1] == [pytest.approx(30.0), pytest.approx(40.0)]


async def test_an_attempt_that_ends_never_drops_out_of_the_use(service: Service) -> None:
    shares = UsedShares()
    job_id = await service.running()
    service.now += timedelta(seconds=80)
    before = used(service, shares)
    await service.jobs.cancel(job_id)
    assert used(service, shares) == before, "it holds its slots while it is cancelled"
    service.end(job_id, 1, Cause.STOPPED)
    assert used(service, shares) == pytest.approx(before, rel=1e-3)
