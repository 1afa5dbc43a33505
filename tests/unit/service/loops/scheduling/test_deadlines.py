"""The scheduler enforces deadlines, also after a restart, and only once."""

from __future__ import annotations

from datetime import timedelta

from dray.views import JobState
from service.db.session import utc_now
from service.runtime import Runtime
from tests.marks import RULES
from tests.unit.service.loops.world import World, causes, comes_to, keeps_its_promises, says

pytestmark = RULES


def soon(seconds: float = 0.5) -> str:
    return (utc_now() + timedelta(seconds=seconds)).isoformat()


async def codes(runtime: Runtime, job_id: str) -> list[str]:
    return [event.code for event in (await runtime.queries.events(job_id)).items]


async def test_a_running_job_is_stopped_at_its_deadline(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits", deadline=soon(1.0))
    job = await comes_to(runtime, job_id, JobState.CANCELLED)
    assert job.reason.code == "deadline_passed"
    assert job.reason.message.startswith("was stopped at its deadline, ")
    assert await causes(runtime, job_id) == ["preempted"]
    assert (await codes(runtime, job_id)).count("deadline_passed") == 2  # asked, and cancelled
    await keeps_its_promises(world, runtime, job_id)


async def test_waiting_jobs_are_cancelled_by_one_of_two_services(world: World) -> None:
    runtime, other = await world.open(), await world.open()
    blocking = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, blocking, JobState.RUNNING)
    late = [await world.submit(other, workers=4, deadline=soon()) for _ in range(3)]
    for job_id in late:
        job = await comes_to(runtime, job_id, JobState.CANCELLED)
        assert (job.reason.code, job.attempt) == ("deadline_passed", 0)
        assert (await codes(runtime, job_id)).count("deadline_passed") == 1
    await runtime.jobs.cancel(blocking)


async def test_a_deadline_outlives_the_service(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits", deadline=soon(1.0))
    await comes_to(runtime, job_id, JobState.RUNNING)
    waiting = await world.submit(runtime, begin_at=soon(60), deadline=soon(61))
    begins = await world.submit(runtime, begin_at=soon(1.0))
    await says(runtime, begins, "begins_at")
    await world.drop(runtime)
    again = await world.open()
    job = await comes_to(again, job_id, JobState.CANCELLED)
    assert job.reason.code == "deadline_passed"
    await comes_to(again, begins, JobState.SUCCEEDED)
    assert (await again.jobs.get(waiting)).reason.code == "begins_at"
