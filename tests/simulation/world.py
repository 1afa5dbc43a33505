"""A simulated world: services that share a database and a cluster, and their users."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, text

from dray import views
from dray.reservations import ReservationRequest
from dray.spec import JobSpec
from ray_workers.shared.commands import Leave
from service.cluster.port import AttemptRef, ClusterUnavailable
from service.config.settings import Settings
from service.domain.errors import (
    DatabaseUnavailable,
    DomainError,
    IdempotencyInFlight,
    NotFound,
    Unsatisfiable,
)
from service.jobs.service import IdempotencyKey
from service.queues.reservations import Reservations
from service.runtime import Runtime
from service.storage.storage import Storage
from tests.simulation.attempt import Plan, SimAttempt
from tests.simulation.cluster import SimCluster
from tests.simulation.process import Process, Weather
from tests.simulation.promises import Broken, Promises

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)
SLOTS = 4
"""Slots per node. No job requests more workers than fit on two nodes."""
PATIENCE_S = 3600.0
RELEASE_S = 75.0
"""Maximum time from the end of the last job to a clean cluster: 60 seconds plus a tick."""

DELETION_S = 65.0
"""Additional time until an interrupted deletion is resumed."""


class World:
    """The state of one simulation. Must be created inside its event loop."""

    def __init__(self, engine: Engine, folder: Path, chance: random.Random) -> None:
        self.engine = engine
        self.chance = chance
        self.loop = asyncio.get_running_loop()
        self.weather = Weather()
        self.promises = Promises(self)
        self.cluster = SimCluster(
            chance, lambda: self.now().timestamp(), self._on_start, self._on_take, self.note
        )
        self.storage = Storage((folder / "storage").as_uri())
        self.settings = Settings(
            home=folder,
            database_url="sqlite:////unused",
            storage_url=self.storage.url,
            ray_address="simulated",
            scheduler_tick_s=10.0,
            poll_wait_s=10.0,
            data_roots=None,
        )
        self.processes: list[Process] = []
        self.acknowledged: dict[str, None] = {}
        self.deleted: dict[str, None] = {}
        """Jobs whose deletion was requested."""
        self.windows: dict[str, None] = {}
        """Names of maintenance windows. A service whose clock is wrong creates them too late."""
        self.trace: list[str] = []
        self.broken: Broken | None = None
        self.num_points = self.num_commits = self._num_checked = 0
        self.ambushes: dict[int, Callable[[Process], None]] = {}
        """Faults to inject, by number of the call. A fault hits the process that makes the call."""
        self.fault_points = range(0)
        """The steps in which the story injects faults. An empty range means all of them."""
        self._numbers = itertools.count(1)
        self._users: list[asyncio.Task[None]] = []

    def now(self) -> datetime:
        """The current time on the database's clock."""
        return START + timedelta(seconds=self.loop.time())

    def note(self, line: str) -> None:
        self.trace.append(f"{self.loop.time():10.3f} {line}")

    def _on_start(self, attempt: SimAttempt) -> None:
        self.note(f"{attempt.key} starts its processes")
        self._see(lambda: self.promises.started(attempt))

    def _on_take(self, attempt: SimAttempt) -> None:
        self._see(self.promises.hold)

    def _see(self, look: Callable[[], None]) -> None:
        """Record that a promise is broken, even if it holds again at the next check."""
        try:
            look()
        except Broken as broken:
            self.broken = self.broken or broken

    def count_point(self, process: Process, call: str) -> None:
        """Called for every call of a service, before and after it arrives."""
        if process.dead:
            return
        self.num_points += 1
        ambush = self.ambushes.pop(self.num_points, None)
        if ambush is not None:
            self.note(f"{process.name} is ambushed {call}")
            ambush(process)

    def check(self) -> None:
        """Raise Broken if a promise is broken now."""
        if self.broken is not None:
            raise self.broken
        if self.num_commits > self._num_checked:
            self._num_checked = self.num_commits
            self.promises.hold()

    # Services.

    def start_process(self, clock_error: timedelta = timedelta()) -> Process:
        process = Process(self, next(self._numbers), clock_error)
        self.processes.append(process)
        self.note(f"{process.name} starts")
        return process

    def some_process(self) -> Process:
        return self.processes[-1]

    # Users.

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._users.append(task)
        return task

    async def ask(self, use: Callable[[Runtime], Coroutine[Any, Any, T]]) -> T:
        """Send a request, and repeat it until a service answers."""
        while True:
            going = [process for process in self.processes if not process.stopped]
            if going:
                try:
                    return await self.chance.choice(going).call(use)
                except (ConnectionError, DatabaseUnavailable, IdempotencyInFlight):
                    pass
            await asyncio.sleep(1.0)

    async def submit(self, plan: Plan, workers: int, **fields: Any) -> str | None:
        """Submit a job and return its ID once acknowledged, or None if no cluster could ever run
        it."""
        number = next(self._numbers)
        key = IdempotencyKey(f"key-{number}", "body")
        document = {"name": plan.name, "recipe": "image_classification", **fields}
        spec = JobSpec.model_validate(document | {"resources": {"num_workers": workers}})

        def use(runtime: Runtime) -> Coroutine[Any, Any, tuple[views.Job, bool]]:
            return runtime.jobs.submit(spec, idempotency=key)

        try:
            job, _ = await self.ask(use)
        except Unsatisfiable:
            return None
        self.acknowledged[job.id] = None
        self.note(f"{job.id} is acknowledged: {plan.name}, {workers} workers")
        return job.id

    async def cancel(self, job_id: str) -> None:
        self.note(f"the user cancels {job_id}")
        try:
            await self.ask(lambda runtime: runtime.jobs.cancel(job_id))
        except DomainError as error:
            self.note(f"{job_id} is not cancelled: {error.code}")

    async def maintain(self, wanted: ReservationRequest) -> None:
        self.windows[wanted.name] = None
        self.note(f"{wanted.name} is created: {wanted.model_dump(exclude_defaults=True)}")
        with contextlib.suppress(DomainError):  # an earlier request whose answer was lost
            await self.ask(lambda runtime: Reservations(runtime.database).create(wanted))

    async def end_maintenance(self, name: str) -> None:
        self.note(f"{name} is deleted")
        with contextlib.suppress(DomainError):
            await self.ask(lambda runtime: Reservations(runtime.database).delete(name))

    async def delete(self, job_id: str) -> None:
        """Delete a job. Has no effect while the job is active."""
        self.note(f"the user deletes {job_id}")
        was = job_id in self.deleted
        self.deleted[job_id] = None
        try:
            await self.ask(lambda runtime: runtime.jobs.delete(job_id))
        except NotFound:
            if not was and not self._was_hidden(job_id):
                raise
        except DomainError as error:
            self.note(f"{job_id} is not deleted: {error.code}")
            if not was:
                del self.deleted[job_id]

    def _was_hidden(self, job_id: str) -> bool:
        """Whether an earlier attempt at the same deletion succeeded but its answer was lost."""
        return job_id in self.deleted

    def preempt(self) -> None:
        """Preempt a running attempt."""
        running = [a for a in self.cluster.of_this_session() if a.alive]
        if running:
            attempt = self.chance.choice(running)
            self.note(f"{attempt.key} is asked to leave")
            ref = AttemptRef(*attempt.key, self.cluster.session, ())
            self.begin(self._preempt(ref))

    async def _preempt(self, ref: AttemptRef) -> None:
        with contextlib.suppress(ClusterUnavailable):
            await self.cluster.send(ref, Leave(5.0))

    # Shutdown.

    def states(self) -> dict[str, str]:
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT id, state FROM jobs")).all()
        return dict(rows)

    async def come_to_rest(self) -> None:
        """Wait in calm weather until every job has ended and nothing is left."""
        self.weather = Weather()
        self.ambushes.clear()
        self.cluster.be_unavailable(None)
        self.note("calm")
        for process in self.processes:
            process.go_on()
        if not self.processes:
            self.start_process()
        while self.cluster.lasting_slots() < 2 * SLOTS:
            self.cluster.add_slots(SLOTS)
        if self._users:
            await asyncio.wait(self._users)
            for user in self._users:
                user.result()
        for name in self.windows:
            await self.end_maintenance(name)
        for job_id in [*self.acknowledged]:
            if job_id in self.endless() and job_id not in self.deleted:
                await self.cancel(job_id)
        deadline = self.loop.time() + PATIENCE_S
        while any(
            state not in ("SUCCEEDED", "FAILED", "CANCELLED") for state in self.states().values()
        ):
            if self.loop.time() > deadline:
                raise Broken(f"I1: these never end: {self.states()}")
            await asyncio.sleep(10.0)
            self.check()
        await asyncio.sleep(RELEASE_S + (DELETION_S if self.hides_any() else 0.0))
        self.check()
        await self.promises.hold_at_the_end()

    def hides_any(self) -> bool:
        """Whether a deletion is in progress or was interrupted."""
        with self.engine.connect() as connection:
            query = text("SELECT count(*) FROM jobs WHERE deleted_at IS NOT NULL")
            return bool(connection.execute(query).scalar_one())

    def endless(self) -> set[str]:
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT id FROM jobs WHERE name LIKE '0.%'")).all()
        return {row[0] for row in rows}

    async def close(self) -> None:
        """Stop everything that is left of this simulation."""
        for process in list(self.processes):
            process.kill()
        me = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not me]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
