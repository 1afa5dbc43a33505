"""Changes of documents and of arrays, for jobs with deadlines, singletons, and limits of queues."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ray_workers.shared.contracts import Cause
from ray_workers.shared.slices import Slice
from service.domain.errors import DependencyCircular, RuntimeTooLong, Unsatisfiable
from service.domain.scheduling import policy
from service.lifecycle import claims
from service.lifecycle.claims import Wanted
from service.loops.shared import queue_view
from tests.unit.service.helpers import Service
from tests.unit.service.jobs.test_array_changes import array_of, change, jobs_of
from tests.unit.service.jobs.test_document_changes import changed


async def test_a_changed_label_changes_no_limit(service: Service) -> None:
    own = await service.submit(max_runtime_s=7200)
    without = await service.submit()
    await service.queue("default", max_runtime_s=600)
    for job_id, limit_s in ((own, 7200), (without, None)):
        job = await changed(service, job_id, labels={"team": "a"})
        assert (job.max_runtime_s, job.labels) == (limit_s, {"team": "a"})
    with pytest.raises(RuntimeTooLong):
        await changed(service, own, max_runtime_s=1200)
    job = await changed(service, own, max_runtime_s=None)
    assert (job.max_runtime_s, job.max_runtime_from) == (600, "queue")


async def test_a_job_that_has_started_can_be_changed_before_its_deadline(service: Service) -> None:
    deadline = (service.now + timedelta(hours=3)).isoformat()
    waits = await service.submit(deadline=deadline, max_runtime_s=3600)
    job_id = await service.running(deadline=deadline, max_runtime_s=7200)
    service.advance(5400)
    service.end(job_id, 1, Cause.PREEMPTED)
    job = await changed(service, job_id, labels={"team": "a"}, max_runtime_s=7000)
    assert job.max_runtime_s == 7000
    with pytest.raises(Unsatisfiable, match="its deadline is"):
        await changed(service, waits, max_runtime_s=7000)


async def test_a_job_does_not_wait_for_a_singleton_that_waits_for_it(service: Service) -> None:
    first, other = await service.submit(name="a"), await service.submit(name="b")
    singleton = await service.submit(name="a", singleton=True)
    for after in ([singleton], [await service.submit(after=[singleton])]):
        with pytest.raises(DependencyCircular):
            await changed(service, first, after=after)
    await changed(service, other, after=[singleton])
    with pytest.raises(DependencyCircular, match=f"itself: {other}, which waits for {singleton}"):
        await changed(service, other, name="a")
    assert (await service.jobs.get(other)).name == "b"


async def test_an_array_is_not_moved_to_a_queue_that_allows_less_time(service: Service) -> None:
    jobs = await array_of(service, 3, max_runtime_s=7200)
    await service.queue("short", max_runtime_s=3600)
    with pytest.raises(RuntimeTooLong, match=f"no job was changed: {jobs[0].id} .index 0.: is"):
        await change(service, jobs[0].array_id, queue="short")
    assert {job.queue for job in await jobs_of(service, jobs[0].array_id or "")} == {"default"}


async def test_a_moved_array_gets_the_default_of_its_queue(service: Service) -> None:
    jobs = await array_of(service, 2)
    await service.queue("short", default_max_runtime_s=600)
    await change(service, jobs[0].array_id, queue="short")
    moved = await jobs_of(service, jobs[0].array_id or "")
    assert [(job.max_runtime_s, job.max_runtime_from) for job in moved] == [(600, "queue")] * 2


@pytest.mark.parametrize(("hours", "grace_s"), [(1.0, 3600.0), (0.005, 60.0)])
async def test_no_grace_period_ends_long_after_the_deadline(
    service: Service, hours: float, grace_s: float
) -> None:
    deadline = (service.now + timedelta(hours=hours)).isoformat()
    job_id = await service.running(deadline=deadline)
    await service.faults.preempt(job_id, 86400.0)
    (command,) = service.followed(job_id).commands
    assert command.grace_s == grace_s  # type: ignore[union-attr]


def planned(service: Service, job_id: str) -> policy.WaitingJob:
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    return next(job for job in waiting if job.job_id == job_id)


def claim(service: Service, job: policy.WaitingJob) -> bool:
    """Claim slots for a job as it was planned; return whether it has started."""
    wanted = Wanted(
        *(job.job_id, 0, "default", (Slice("node-a", 1),), job.request.bundle),
        request_seen=job.request,
        array_limit_seen=None if job.array is None else job.array.max_running,
    )
    found = service.database.write_sync(
        lambda s: claims.claim(s, [wanted], service.deployment, service.now)
    )
    return found[0] is not None


async def test_a_plan_of_an_earlier_limit_of_the_array_does_not_start_jobs(
    service: Service,
) -> None:
    jobs = await array_of(service, 2, array={"max_running": 2})
    seen = [planned(service, job.id) for job in jobs]
    await change(service, jobs[0].array_id, max_running=1)
    assert not claim(service, seen[1])
    assert claim(service, planned(service, jobs[0].id))


async def test_a_singleton_that_was_renamed_after_the_plan_does_not_start(
    service: Service,
) -> None:
    await service.running(name="a")
    job_id = await service.submit(name="b", singleton=True)
    seen = planned(service, job_id)
    await changed(service, job_id, name="a")
    assert not claim(service, seen)
