"""Helpers for testing the loops: services, a fake cluster, scripts, and functions that wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from dray import views
from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.config.settings import Settings
from service.db.session import utc_now
from service.lifecycle import withholding
from service.loops.shared.timings import LoopTimings
from service.runtime import Runtime
from service.telemetry.series_filters import MetricsFilter
from tests.fakes.attempt import Failed, FakeRank, Play
from tests.fakes.cluster import FakeCluster

T = TypeVar("T")
Clock = Callable[[], datetime]
PATIENCE_S = 60.0
LOOK_S = 0.01
STEPS = 5


async def trains(rank: FakeRank) -> None:
    """Runs five steps, with a log line for each."""
    for step in range(1, STEPS + 1):
        rank.print(f"rank {rank.rank} is at {step}")
        rank.report(step, train_loss=1.0 / step)


async def waits(rank: FakeRank) -> None:
    """Runs one step, and then continues until it is stopped."""
    rank.report(1, train_loss=1.0)
    await asyncio.get_running_loop().create_future()


async def fails(rank: FakeRank) -> None:
    raise ValueError("the sky is red")


async def lacks_data(rank: FakeRank) -> None:
    raise Failed(Cause.BAD_DATA, "the samples are missing")


class World:
    """Services that share a database, a storage, and a cluster. A job's name selects its script."""

    def __init__(self, database_url: str, home: Path) -> None:
        self._database_url = database_url
        self._home = home
        self._runtimes: list[Runtime] = []
        self.plays: dict[str, Play] = {
            play.__name__: play for play in (trains, waits, fails, lacks_data)
        }
        self.gate = asyncio.Event()
        """Event for scripts that wait until the test sets it."""
        self.fake = FakeCluster({"node-a": {"CPU": 4.0}}, self._play)
        self.timings = LoopTimings(
            watch_period_s=0.05,
            joining_period_s=0.02,
            reply_period_s=0.02,
            unavailable_pause_s=0.02,
            last_launches_s=0.2,
        )
        """The settings for services that are opened from now on."""

    def set_timings(self, **changes: Any) -> None:
        self.timings = replace(self.timings, **changes)

    async def _play(self, rank: FakeRank) -> None:
        await self.plays[rank.spec.spec["name"]](rank)

    async def open(self, clock: Clock = utc_now, **settings: Any) -> Runtime:
        """Return a service that runs the loops, or waits for the lease."""
        number = len(self._runtimes)
        runtime = await Runtime.open(
            Settings(
                home=self._home / f"home-{number}",
                database_url=self._database_url,
                storage_url=(self._home / "storage").as_uri(),
                **{
                    "ray_address": "fake:6379",
                    "scheduler_tick_s": 0.05,
                    "poll_wait_s": 0.5,
                    **settings,
                },
            ),
            cluster=self.fake,
            clock=clock,
            timings=self.timings,
        )
        self._runtimes.append(runtime)
        return runtime

    async def drop(self, runtime: Runtime) -> None:
        """Terminate the service regardless of what its loops are doing, without the cluster
        noticing."""
        self._runtimes.remove(runtime)
        await runtime.stop()

    async def close(self) -> None:
        for runtime in list(self._runtimes):
            await self.drop(runtime)
        await self.fake.shut_down()

    async def submit(
        self,
        runtime: Runtime,
        play: str = "trains",
        workers: int = 1,
        owner: str = "default",
        **fields: Any,
    ) -> str:
        document = {"name": play, "recipe": "image_classification", **fields}
        spec = JobSpec.model_validate(document | {"resources": {"num_workers": workers}})
        job, created = await runtime.jobs.submit(spec, owner=owner)
        assert created
        return job.id


async def withhold(runtime: Runtime, hostname: str, code: str = "xid_79") -> None:
    """Give the node no new work, as after a fault."""

    def work(session: Session) -> None:
        now = runtime.database.time(session)
        withholding.withhold(session, hostname, "a fault", code=code, now=now, mark=str(now))

    await runtime.database.write(work)


async def eventually(
    probe: Callable[[], Awaitable[T]], why: str, within_s: float = PATIENCE_S
) -> T:
    """Return the result of `probe` as soon as it is truthy; raise AssertionError after the
    limit."""
    deadline = time.monotonic() + within_s
    while not (answer := await probe()):
        assert time.monotonic() < deadline, f"{why} (last answer: {answer!r})"
        await asyncio.sleep(LOOK_S)
    return answer


async def comes_to(runtime: Runtime, job_id: str, *states: JobState) -> views.Job:
    """Return the job as soon as it is in one of the states."""
    deadline = time.monotonic() + PATIENCE_S
    job = await runtime.jobs.get(job_id)
    while job.state not in states:
        assert not job.state.is_terminal, f"it ended: {job.reason}"
        assert time.monotonic() < deadline, f"it stays {job.state}: {job.reason}"
        job = await runtime.jobs.wait(job_id, wait_s=1.0, known_state=job.state)
    return job


async def says(runtime: Runtime, job_id: str, code: str) -> views.Explanation:
    """Return the explanation as soon as its reason has this code."""

    async def explained() -> views.Explanation | None:
        explanation = await runtime.queries.explain(job_id)
        return explanation if explanation.reason.code == code else None

    found = await eventually(explained, f"{job_id} never had the reason {code}")
    assert found is not None
    return found


async def reports_step(runtime: Runtime, job_id: str, step: int) -> None:
    """Wait until the service has stored a step of rank 0."""

    async def stored() -> bool:
        progress = (await runtime.jobs.get(job_id)).progress
        return progress is not None and progress.step >= step

    await eventually(stored, f"step {step} of {job_id} was never stored")


async def causes(runtime: Runtime, job_id: str) -> list[str | None]:
    """Return the reason of each attempt's end."""
    attempts = (await runtime.queries.attempts(job_id)).items
    return [attempt.reason.code if attempt.reason else None for attempt in attempts]


async def charges(runtime: Runtime, job_id: str) -> list[str]:
    """Return the budget to which each retry was charged."""
    events = (await runtime.queries.events(job_id)).items
    return [event.data["charged_to"] for event in events if "charged_to" in event.data]


async def steps_of(runtime: Runtime, job_id: str, rank: int = 0) -> list[int]:
    metrics = await runtime.queries.metrics(job_id, MetricsFilter(rank=rank))
    return metrics.series["train/loss"].steps


async def log_of(runtime: Runtime, job_id: str, attempt: int = 1) -> list[str]:
    page = await runtime.queries.logs(job_id, attempt=attempt)
    return [line.text for line in page.items]


async def keeps_its_promises(world: World, runtime: Runtime, job_id: str) -> None:
    """Check I2, I4, I5, I7, and I8 for a completed job."""
    job = await runtime.jobs.get(job_id)
    assert job.state.is_terminal
    events = (await runtime.queries.events(job_id)).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    ends = [e for e in events if e.to_state is not None and e.to_state.is_terminal]
    assert len(ends) == 1
    for series in (await runtime.queries.metrics(job_id)).series.values():
        assert series.steps == sorted(set(series.steps))
    assert world.fake.crowds.get(job_id, 0) <= 1
    for attempt in range(1, job.attempt + 1):
        await world.fake.forgotten(job_id, attempt)
