"""A job is cancelled once it can't end before its deadline; a running job is stopped then."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.domain.errors import Unsatisfiable
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.simulation import Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.lifecycle import deadlines
from service.loops.shared import queue_view
from service.outlook import forecasts
from service.outlook.step_times import RunTimes
from tests.marks import RULES
from tests.unit.service.helpers import START, Service, events_of, spec

pytestmark = RULES
HOUR = 3600.0


def after(service: Service, seconds: float) -> str:
    return (service.now + timedelta(seconds=seconds)).isoformat()


def enforce(service: Service) -> None:
    """Cancel the waiting jobs that are late, as the scheduler does."""
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    late = [job.job_id for job in waiting if job.start_by and job.start_by <= service.now]
    service.database.write_sync(lambda s: deadlines.cancel_waiting(s, late, service.now))


async def state_of(service: Service, job_id: str) -> tuple[JobState, str]:
    job = await service.jobs.get(job_id)
    return job.state, job.reason.code


CANCELLED = (JobState.CANCELLED, "deadline_passed")


@pytest.mark.parametrize(
    ("fields", "in_s", "message"),
    [
        ({}, 0, "has passed"),
        ({}, -HOUR, "has passed"),
        (
            {"max_runtime_s": 3601},
            HOUR,
            "with max_runtime_s: 3601 the job might run past its deadline",
        ),
    ],
)
async def test_a_deadline_that_can_not_be_met_is_refused(
    service: Service, fields: dict[str, object], in_s: float, message: str
) -> None:
    with pytest.raises(Unsatisfiable, match=message) as told:
        await service.submit(deadline=after(service, in_s), **fields)
    assert told.value.pointer == "/deadline"
    assert not (await service.jobs.list()).items


async def test_a_refusal_shows_the_deadline_in_utc(service: Service) -> None:
    with pytest.raises(Unsatisfiable, match="its deadline, 2020-06-30 22:00:00 UTC, has passed"):
        await service.submit(deadline="2020-07-01T00:00:00+02:00")


async def test_the_limit_is_counted_from_the_begin_time(service: Service) -> None:
    fields = {"max_runtime_s": 3600, "begin_at": after(service, HOUR)}
    with pytest.raises(Unsatisfiable):
        await service.submit(deadline=after(service, 2 * HOUR - 1), **fields)
    await service.submit(deadline=after(service, 2 * HOUR), **fields)
    with pytest.raises(Unsatisfiable):
        await service.jobs.dry_run(spec(deadline=after(service, 2 * HOUR - 1), **fields))


async def test_a_waiting_job_is_cancelled_once_its_limit_no_longer_fits(service: Service) -> None:
    limited = await service.submit(deadline=after(service, HOUR), max_runtime_s=600)
    unlimited = await service.submit(deadline=after(service, HOUR))
    service.advance(HOUR - 601)
    enforce(service)
    assert (await service.jobs.get(limited)).state is JobState.QUEUED
    service.advance(1)
    assert service.claim(limited) is None, "it is too late, even before it is cancelled"
    enforce(service)
    assert await state_of(service, limited) == CANCELLED
    assert (await service.jobs.get(limited)).reason.message.endswith(
        "because its max_runtime_s is 600"
    )
    assert (await service.jobs.get(unlimited)).state is JobState.QUEUED
    service.advance(600)
    assert service.claim(unlimited) is None
    enforce(service)
    assert await state_of(service, unlimited) == CANCELLED
    enforce(service)
    assert len(await events_of(service, unlimited, "state")) == 2


async def test_a_job_that_has_run_may_continue_until_its_deadline(service: Service) -> None:
    job_id = await service.running(deadline=after(service, HOUR), max_runtime_s=1800)
    service.end(job_id, 1, Cause.PREEMPTED)
    service.advance(HOUR - 60)
    enforce(service)
    assert service.claim(job_id, 1) is not None


async def test_a_job_that_waits_for_a_retry_is_cancelled_at_its_deadline(service: Service) -> None:
    job_id = await service.running(deadline=after(service, 10))
    service.end(job_id, 1, Cause.NODE_LOST)
    service.advance(10)
    enforce(service)
    assert await state_of(service, job_id) == CANCELLED


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.NODE_LOST, Cause.USER_ERROR])
async def test_an_attempt_that_ends_after_the_deadline_is_not_retried(
    service: Service, cause: Cause
) -> None:
    job_id = await service.running(deadline=after(service, 10))
    service.advance(11)
    service.end(job_id, 1, cause, "it broke")
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == CANCELLED
    assert ("it broke" in job.reason.message) == (cause is not Cause.PREEMPTED)


async def test_a_job_that_succeeds_while_it_is_stopped_has_succeeded(service: Service) -> None:
    job_id = await service.running(deadline=after(service, 10))
    service.advance(11)
    assert service.database.write_sync(
        lambda s: deadlines.stop_running(s, job_id, 1, 30.0, service.now)
    )
    (asked,) = await events_of(service, job_id, "preempting")
    assert (asked.code, asked.message) == (
        "deadline_passed",
        "was asked to save a checkpoint and release its slots within 30 s: "
        "it has reached its deadline",
    )
    service.end(job_id, 1)
    assert (await service.jobs.get(job_id)).state is JobState.SUCCEEDED


async def test_a_job_is_asked_to_leave_once(service: Service) -> None:
    job_id = await service.running(deadline=after(service, 10))

    def past() -> bool:
        _, live = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
        return live[0].is_past_deadline

    assert not past()
    service.advance(10)
    assert past()
    service.database.write_sync(lambda s: deadlines.stop_running(s, job_id, 1, 30.0, service.now))
    assert not past()
    assert not service.database.write_sync(
        lambda s: deadlines.stop_running(s, job_id, 1, 30.0, service.now)
    )


async def test_a_user_who_cancels_is_named(service: Service) -> None:
    job_id = await service.running(deadline=after(service, 10))
    await service.jobs.cancel(job_id)
    service.advance(10)
    _, live = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    assert not live[0].is_past_deadline
    service.end(job_id, 1, Cause.STOPPED)
    assert await state_of(service, job_id) == (JobState.CANCELLED, "cancelled_by_user")


async def test_jobs_after_a_late_job_are_cancelled_or_start(service: Service) -> None:
    late = await service.submit(deadline=after(service, 10), array={"size": 2})
    array_id = (await service.jobs.get(late)).array_id
    of_success = await service.submit(after=[array_id])
    of_end = await service.submit(after=[{"job": array_id, "on": "end"}])
    both = await service.submit(after=[of_end], deadline=after(service, 10))
    held = await service.submit(deadline=after(service, 10))
    await service.change(held, held=True)
    service.advance(10)
    enforce(service)
    assert await state_of(service, late) == CANCELLED
    assert await state_of(service, held) == CANCELLED
    assert await state_of(service, both) == CANCELLED
    assert (await state_of(service, of_success))[1] == "dependency_never_satisfied"
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    assert [(job.job_id, job.after) for job in waiting] == [(of_end, ())]


async def test_forecasts_end_jobs_at_their_deadlines(service: Service) -> None:
    running = await service.running(deadline=after(service, HOUR))
    late = await service.submit(deadline=after(service, 2 * HOUR), max_runtime_s=2 * 3600 - 60)
    waiting = await service.submit()
    (first, second), live = service.database.read_sync(
        lambda s: queue_view.snapshot(s, service.now)
    )
    assert (first.job_id, second.job_id) == (late, waiting)
    ((attempt,), now) = (live, service.now)
    assert attempt.running is not None
    assert attempt.running.ends_within_s == HOUR
    snapshot = policy.Snapshot(
        (first, replace(second, priority=0)),
        (policy.Node("node-a", {"CPU": 1.0}, {"CPU": 0.0}),),
        connected=True,
        holders=(policy.Holder(running, attempt.slices, {"CPU": 1.0}),),
        running=(replace(attempt.running, left_s=5 * HOUR),),
    )
    found = Simulation(Situation(snapshot), now).run()
    assert found[waiting].at is not None
    assert HOUR <= (found[waiting].at - now).total_seconds() <= 1.2 * HOUR
    why = found[late].why
    assert why is not None
    assert (why.code, found[late].at) == ("deadline_passed", None)


def test_a_running_job_is_expected_to_end_at_its_deadline() -> None:
    times = {"earliest_end_at": 1 * HOUR, "latest_end_at": 3 * HOUR}
    progress = {name: (START + timedelta(seconds=s)).isoformat() for name, s in times.items()}
    progress |= {"total_steps": 100}
    for hours, expected in ((0.5, (0.5, 0.5, 0.5)), (2.5, (1, 2, 2.5)), (None, (1, 2, 3))):
        deadline = None if hours is None else START + timedelta(hours=hours)
        job = SimpleNamespace(id="j", state=JobState.RUNNING, progress=progress, deadline=deadline)
        end = forecasts.ends(forecasts.Facts([job], [], RunTimes()), START)["j"]  # type: ignore[list-item]
        found = [
            at and (at - START) / timedelta(hours=1) for at in (end.earliest, end.at, end.latest)
        ]
        assert tuple(found) == expected
