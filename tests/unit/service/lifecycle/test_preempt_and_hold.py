"""A job is preempted and then held, with both databases."""

from __future__ import annotations

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.domain.errors import JobNotRunning, JobNotWaiting
from tests.unit.service.helpers import Service, events_of
from tests.unit.service.jobs.test_dependencies import starts


async def test_a_preempted_job_is_held_until_it_is_released(service: Service) -> None:
    job_id = await service.running()
    job = await service.faults.preempt(job_id, 5.0, held=True, actor="bob")
    assert (job.state, job.held_by) == (JobState.RUNNING, None)
    events = await events_of(service, job_id, "preempting")
    assert [(event.code, event.message, event.actor) for event in events] == [
        *(
            (
                "preempt_asked",
                "was asked to save a checkpoint and release its slots within 5 s",
                "bob",
            ),
            ("hold_asked", "will be held by bob once it waits again", "bob"),
        )
    ]
    service.report(job_id, 1, [service.checkpoint(job_id, 1, 50)])
    service.end(job_id, 1, Cause.PREEMPTED, "left")
    job = await service.jobs.get(job_id)
    assert (job.state, job.held_by, job.reason.code) == (JobState.QUEUED, "bob", "preempted")
    assert f"is held by bob; `dray release {job_id}` releases it" in job.reason.message
    service.advance(3600)
    assert not starts(service, job_id)
    await service.change(job_id, held=False)
    assert starts(service, job_id)
    resumed = service.claim(job_id, 1)
    assert resumed is not None
    assert resumed.resume_from[0].step == 50
    service.end(job_id, 2, Cause.PREEMPTED)
    assert (await service.jobs.get(job_id)).held_by is None


async def test_a_job_that_was_already_asked_can_still_be_held(service: Service) -> None:
    job_id = await service.running()
    await service.faults.preempt(job_id)
    for _ in range(2):
        await service.faults.preempt(job_id, held=True)
    assert len(await events_of(service, job_id, "preempting")) == 2
    service.end(job_id, 1, Cause.NODE_LOST)
    assert (await service.jobs.get(job_id)).held_by == "anonymous"


async def test_a_job_that_ends_first_is_not_held(service: Service) -> None:
    job_id = await service.running()
    await service.faults.preempt(job_id, held=True)
    service.end(job_id, 1)
    job = await service.jobs.get(job_id)
    assert (job.state, job.held_by) == (JobState.SUCCEEDED, None)
    with pytest.raises(JobNotRunning):
        await service.faults.preempt(job_id, held=True)


async def test_a_script_is_warned_about_its_unsaved_work(service: Service) -> None:
    job_id = await service.running(recipe=None, script={"entrypoint": "train.py"})
    await service.faults.preempt(job_id, 5.0)
    (event,) = await events_of(service, job_id, "preempting")
    assert event.message == (
        "was asked to release its slots within 5 s; its processes get SIGTERM, and work that "
        "they do not save is lost"
    )


async def test_the_hold_is_withdrawn_before_the_job_waits(service: Service) -> None:
    job_id = await service.running()
    await service.faults.preempt(job_id, held=True)
    await service.change(job_id, held=False)
    with pytest.raises(JobNotWaiting):
        await service.change(job_id, held=False)
    (event,) = await events_of(service, job_id, "queue")
    assert (event.code, event.actor) == ("released", "ann")
    service.end(job_id, 1, Cause.PREEMPTED)
    assert (await service.jobs.get(job_id)).held_by is None
