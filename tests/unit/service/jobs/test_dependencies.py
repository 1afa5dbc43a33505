"""Jobs that start after others, with both databases."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db.repositories.submission import dependencies as repository
from service.domain.errors import DependencyNeverSatisfied, DependencyNotFound, DomainError, JobLive
from service.domain.scheduling import policy
from service.domain.scheduling.policy import Node, Snapshot, Start, Wait
from service.loops.shared.queue_view import snapshot
from tests.unit.service.helpers import Service, events_of


def decisions(service: Service) -> dict[str, policy.Decision]:
    """Return the scheduler's decision for each job if there are enough slots."""
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    nodes = (Node("node-a", {"CPU": 64.0}, {"CPU": 64.0}),)
    return {d.job_id: d for d in policy.plan(Snapshot(waiting, nodes, True), service.now)}


def why_waits(service: Service, job_id: str) -> str:
    decision = decisions(service)[job_id]
    assert isinstance(decision, Wait)
    assert decision.reason.code == "waiting_for_jobs"
    return decision.reason.message


def starts(service: Service, job_id: str) -> bool:
    return isinstance(decisions(service)[job_id], Start)


async def state_of(service: Service, job_id: str) -> JobState:
    return (await service.jobs.get(job_id)).state


async def array_of(service: Service, size: int, **fields: Any) -> tuple[str, list[str]]:
    """Return the id of an array, and the ids of its jobs by index."""
    first = await service.jobs.get(await service.submit(array={"size": size}, **fields))
    assert first.array_id is not None
    found = await service.jobs.list(limit=500)
    jobs = [job for job in found.items if job.array_id == first.array_id]
    return first.array_id, [job.id for job in sorted(jobs, key=lambda job: job.array_index or 0)]


def num_open(service: Service) -> int:
    return len(service.database.read_sync(repository.all_open))


async def test_a_job_waits_for_the_success_of_another_and_then_starts(service: Service) -> None:
    first = await service.submit()
    second = await service.submit(after=[first])
    assert why_waits(service, second) == f"waits for the success of {first} (QUEUED)"
    service.claim(first)
    assert why_waits(service, second) == f"waits for the success of {first} (STARTING)"
    service.end(first, 1)
    assert starts(service, second)
    assert num_open(service) == 0
    assert (await service.jobs.get(second)).spec["after"] == [
        {"job": first, "on": "success", "each": False}
    ]


async def test_a_job_waits_for_all_that_it_names(service: Service) -> None:
    names = [await service.running() for _ in range(5)]
    last = await service.submit(after=names)
    assert why_waits(service, last) == (
        "waits for "
        + ", ".join(f"the success of {name} (RUNNING)" for name in names[:3])
        + ", and 2 more"
    )
    for name in names:
        assert not starts(service, last)
        service.end(name, 1)
    assert starts(service, last)


async def test_a_job_after_one_that_fails_is_cancelled_with_a_reason_and_so_are_those_after_it(
    service: Service,
) -> None:
    first = await service.running()
    second = await service.submit(after=[first])
    third = await service.submit(after=[second])
    anyway = await service.submit(after=[{"job": second, "on": "end"}])
    service.end(first, 1, Cause.BAD_DATA)
    for job_id, before, ended in ((second, first, "failed"), (third, second, "was cancelled")):
        job = await service.jobs.get(job_id)
        assert (job.state, job.reason.code) == (JobState.CANCELLED, "dependency_never_satisfied")
        assert job.reason.message == (f"depends on the success of {before}, which {ended}")
        assert job.finished_at == service.now
        event = (await events_of(service, job_id))[-1]
        assert (event.seq, event.to_state, event.code) == (2, job.state, job.reason.code)
        assert event.data == {"after": before, "job": before}
    assert starts(service, anyway)
    assert num_open(service) == 0


async def test_a_retry_is_no_end(service: Service) -> None:
    first = await service.running(max_retries=1)
    second = await service.submit(after=[first])
    service.end(first, 1, Cause.USER_ERROR)
    assert await state_of(service, first) is JobState.QUEUED
    assert why_waits(service, second)


async def test_jobs_after_one_that_is_cancelled_are_cancelled(service: Service) -> None:
    first = await service.submit()
    second = await service.submit(after=[first])
    await service.jobs.cancel(first)
    assert await state_of(service, second) is JobState.CANCELLED


async def test_a_waiting_job_that_is_cancelled_waits_for_nothing_more(service: Service) -> None:
    first = await service.running()
    second = await service.submit(after=[first])
    await service.jobs.cancel(second)
    assert num_open(service) == 0
    service.end(first, 1, Cause.BAD_DATA)
    assert (await service.jobs.get(second)).reason.code == "cancelled_by_user"


async def test_a_job_that_ended_well_before_the_submit_holds_nothing_up(service: Service) -> None:
    first = await service.running()
    service.end(first, 1)
    assert starts(service, await service.submit(after=[first]))


@pytest.mark.parametrize("on", ["success", "end"])
async def test_a_job_that_ended_badly_before_the_submit(service: Service, on: str) -> None:
    first = await service.running()
    service.end(first, 1, Cause.BAD_DATA)
    fine = await service.running()
    after = [fine, {"job": first, "on": on}]
    if on == "end":
        assert why_waits(service, await service.submit(after=after)).endswith(f"{fine} (RUNNING)")
        return
    with pytest.raises(DependencyNeverSatisfied, match=f"on the success of {first}, which fail"):
        await service.submit(after=after)
    assert len((await service.jobs.list()).items) == 2
    assert num_open(service) == 0


async def test_what_is_not_there_is_refused_with_the_field_at_fault(service: Service) -> None:
    there = await service.submit()
    gone = await service.running()
    service.end(gone, 1)
    await service.jobs.delete(gone)
    for name in ("job-none", "array-none", gone):
        with pytest.raises(DependencyNotFound) as refused:
            await service.submit(after=[there, name])
        assert refused.value.pointer == "/after/1/job"
    assert num_open(service) == 0


async def test_a_job_that_others_wait_for_can_not_be_deleted_and_then_nobody_waits(
    service: Service,
) -> None:
    first = await service.running()
    second = await service.submit(after=[first])
    with pytest.raises(JobLive):
        await service.jobs.delete(first)
    service.end(first, 1)
    await service.jobs.delete(first)
    assert starts(service, second)


async def test_a_job_after_an_array_waits_for_all_its_jobs(service: Service) -> None:
    array_id, jobs = await array_of(service, 3)
    last = await service.submit(after=[array_id])
    says = f"waits for the success of {array_id} (3 of its jobs have not ended)"
    assert why_waits(service, last) == says
    for job_id in jobs:
        assert not starts(service, last)
        service.claim(job_id)
        service.end(job_id, 1)
    assert starts(service, last)


async def test_a_job_after_an_array_is_cancelled_when_the_first_of_it_fails(
    service: Service,
) -> None:
    array_id, jobs = await array_of(service, 3)
    last = await service.submit(after=[array_id])
    anyway = await service.submit(after=[{"job": array_id, "on": "end"}])
    service.claim(jobs[1])
    service.end(jobs[1], 1, Cause.BAD_DATA)
    assert (await service.jobs.get(last)).reason.message == (
        f"depends on the success of {array_id}, of which {jobs[1]} failed"
    )
    with pytest.raises(DependencyNeverSatisfied, match=f"of which {jobs[1]} failed"):
        await service.submit(after=[array_id])
    assert not starts(service, anyway)
    await service.jobs.arrays.cancel(array_id)
    assert starts(service, anyway)


async def test_an_array_after_a_job_waits_and_falls_as_one(service: Service) -> None:
    first = await service.running()
    array_id, jobs = await array_of(service, 3, after=[first])
    assert num_open(service) == 1
    after_one = await service.submit(after=[jobs[2]])
    after_all = await service.submit(after=[array_id])
    assert all(why_waits(service, job_id) for job_id in jobs)
    await service.jobs.cancel(jobs[0])
    assert why_waits(service, jobs[1])
    service.end(first, 1, Cause.BAD_DATA)
    for job_id in (*jobs, after_one, after_all):
        assert await state_of(service, job_id) is JobState.CANCELLED
    assert num_open(service) == 0


async def test_explain_names_the_jobs_that_are_waited_for(service: Service) -> None:
    first = await service.running(max_runtime_s=60)
    second = await service.submit(after=[first])
    note(service)
    found = await service.queries.explain(second)
    assert found.reason.code == "waiting_for_jobs"
    assert found.blocked_by == [first]
    assert [job.id for job in found.running] == [first]
    array_id, _ = await array_of(service, 2)
    third = await service.submit(after=[array_id])
    note(service)
    found = await service.queries.explain(third)
    assert found.blocked_by == [array_id]


def note(service: Service) -> None:
    """Store the decisions as the scheduler would."""
    from service.lifecycle import transitions

    waits = [d for d in decisions(service).values() if isinstance(d, Wait)]
    service.database.write_sync(lambda s: transitions.note_waiting(s, waits, service.now))


async def test_a_submit_and_the_end_of_what_it_names_never_miss_each_other(
    service: Service,
) -> None:
    """In both orders, the job does not wait for a job that has ended."""
    for cause in [Cause.SUCCEEDED, Cause.BAD_DATA] * 8:
        first = await service.running()
        with ThreadPoolExecutor(1) as ending:
            ended = ending.submit(service.end, first, 1, cause)
            try:
                second = await service.submit(after=[first])
            except DomainError:
                assert cause is Cause.BAD_DATA
                ended.result()
                continue
            ended.result()
        if cause is Cause.SUCCEEDED:
            assert starts(service, second)
        else:
            assert await state_of(service, second) is JobState.CANCELLED
        assert num_open(service) == 0


async def test_the_last_jobs_of_an_array_that_end_at_once_are_seen_by_one_of_them(
    service: Service,
) -> None:
    for _ in range(8):
        array_id, jobs = await array_of(service, 4)
        last = await service.submit(after=[array_id])
        for job_id in jobs:
            service.claim(job_id)
        with ThreadPoolExecutor(4) as ending:
            list(ending.map(lambda job_id: service.end(job_id, 1), jobs))
        assert starts(service, last)


async def test_a_cancel_and_a_cascade_that_meet_leave_nothing_open(service: Service) -> None:
    for _ in range(8):
        first = await service.running()
        second = await service.submit(after=[first])
        third = await service.submit(after=[second])
        with ThreadPoolExecutor(1) as ending:
            ended = ending.submit(service.end, first, 1, Cause.BAD_DATA)
            await service.jobs.cancel(second)
            ended.result()
        states = await asyncio.gather(*(state_of(service, job) for job in (second, third)))
        assert states == [JobState.CANCELLED] * 2
        assert num_open(service) == 0
