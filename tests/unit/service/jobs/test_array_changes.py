"""The jobs of an array are changed together, in one transaction."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dray import views
from dray.filters import JobFilter
from dray.requests import ArrayChangeRequest
from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db.repositories.scheduling import queues as queues_repository
from service.domain.errors import ArrayNotFound, PriorityTooHigh, QueueFull, UnknownQueue
from service.domain.scheduling import policy
from service.jobs.array_changes import ArrayChanges
from service.loops.shared import queue_view
from tests.unit.service.helpers import Service, events_of


async def array_of(service: Service, size: int, **fields: Any) -> list[views.Job]:
    """Submit an array, and return its jobs in the order of their indices."""
    array = {"size": size} | fields.pop("array", {})
    first = await service.jobs.get(await service.submit(array=array, **fields))
    return await jobs_of(service, first.array_id or "")


async def jobs_of(service: Service, array_id: str) -> list[views.Job]:

    page = await service.jobs.list(JobFilter(array=array_id), limit=500)
    return sorted(page.items, key=lambda job: job.array_index or 0)


async def change(
    service: Service, array_id: str | None, *, is_admin: bool = False, **fields: Any
) -> views.ArrayChange:
    changes = ArrayChanges(service.database, service.settings, clock=lambda: service.now)
    wanted = ArrayChangeRequest.model_validate(fields)
    return await changes.change(array_id or "", wanted, actor="bob", is_admin=is_admin)


def counts(done: views.ArrayChange) -> tuple[int, int, dict[str, int]]:
    return done.changed, done.unchanged, done.skipped


async def test_only_waiting_jobs_are_held_and_the_others_are_counted(service: Service) -> None:
    jobs = await array_of(service, 5)
    await service.jobs.cancel(jobs[0].id)
    assert service.claim(jobs[1].id) is not None
    await service.change(jobs[2].id, held=True)
    array_id = jobs[0].array_id
    done = await change(service, array_id, held=True)
    assert counts(done) == (2, 1, {"job_finished": 1, "job_not_waiting": 1})
    assert [job.held_by for job in await jobs_of(service, array_id or "")] == [
        *(None, None, "ann", "bob", "bob")
    ]
    (event,) = await events_of(service, jobs[3].id, "queue")
    assert (event.code, event.actor) == ("held", "bob")
    done = await change(service, array_id, held=False, priority=70)
    assert counts(done) == (3, 0, {"job_finished": 1, "job_not_waiting": 1})
    assert counts(await change(service, array_id, held=False)) == (
        *(0, 3),
        {"job_finished": 1, "job_not_waiting": 1},
    )


async def test_a_priority_applies_to_running_jobs_too(service: Service) -> None:
    jobs = await array_of(service, 3)
    assert service.claim(jobs[1].id) is not None
    assert counts(await change(service, jobs[0].array_id, priority=70)) == (3, 0, {})
    assert {job.priority for job in await jobs_of(service, jobs[0].array_id or "")} == {70}


async def test_no_job_is_changed_if_the_queue_refuses_one(service: Service) -> None:
    jobs = await array_of(service, 3)
    await service.queue("small", max_queued=2, max_priority=40)
    array_id = jobs[0].array_id
    named = rf"no job was changed: {jobs[0].id} \(index 0\)"
    with pytest.raises(QueueFull, match=named):
        await change(service, array_id, queue="small", priority=30)
    with pytest.raises(UnknownQueue, match=named):
        await change(service, array_id, queue="smal")
    await service.change(jobs[2].id, queue="small", priority=30)
    with pytest.raises(PriorityTooHigh, match=rf"{jobs[2].id} \(index 2\)"):
        await change(service, array_id, priority=50, held=True)
    after = await jobs_of(service, array_id or "")
    assert [(job.queue, job.held_by) for job in after] == [
        *[("default", None)] * 2,
        ("small", None),
    ]
    assert counts(await change(service, array_id, priority=50, is_admin=True)) == (1, 2, {})
    with pytest.raises(ArrayNotFound):
        await change(service, "array-missing", held=True)


async def test_an_array_fits_a_queue_that_has_space_for_all_of_it(service: Service) -> None:
    jobs = await array_of(service, 3)
    await service.queue("small", max_queued=3)
    assert counts(await change(service, jobs[0].array_id, queue="small")) == (3, 0, {})
    assert counts(await change(service, jobs[0].array_id, queue="small")) == (0, 3, {})


async def test_the_space_in_a_queue_is_compared_with_the_whole_array_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.queue("night", max_queued=4)
    jobs = await array_of(service, 4)
    for job in jobs:  # they have run for different times
        service.claim(job.id)
        service.report(job.id, 1)
        service.advance(60)
    for job in jobs:
        service.end(job.id, 1, Cause.NODE_LOST)
    asked = []
    count = queues_repository.count_waiting
    monkeypatch.setattr(queues_repository, "count_waiting", lambda *a: asked.append(a) or count(*a))
    assert (await change(service, jobs[0].array_id, queue="night")).changed == 4
    assert len(asked) == 1
    await service.queue("evening", max_queued=3)
    with pytest.raises(QueueFull, match="4 more would exceed"):
        await change(service, jobs[0].array_id, queue="evening")


async def test_an_array_is_moved_to_the_front_in_the_order_of_its_indices(
    service: Service,
) -> None:
    others = [await service.submit() for _ in range(2)]
    jobs = await array_of(service, 3)
    done = await change(service, jobs[0].array_id, first=True, is_admin=True)
    assert counts(done) == (3, 0, {})
    assert order(service) == [*(job.id for job in jobs), *others]
    done = await change(service, jobs[0].array_id, first=True, is_admin=True)
    assert counts(done) == (0, 3, {})


def order(service: Service) -> list[str]:
    """Return the waiting jobs in scheduling order."""
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    plan = policy.plan(policy.Snapshot(waiting, (), connected=False), service.now)
    return [decision.job_id for decision in plan]


async def test_the_limit_of_running_jobs_is_changed_while_jobs_run(service: Service) -> None:
    jobs = await array_of(service, 6, array={"max_running": 3})
    array_id = jobs[0].array_id
    for job in jobs[:3]:
        assert service.claim(job.id) is not None
    done = await change(service, array_id, max_running=2)
    assert counts(done) == (6, 0, {})
    assert done.array.max_running == 2
    states = Counter(job.state for job in await jobs_of(service, array_id or ""))
    assert states == {JobState.STARTING: 3, JobState.QUEUED: 3}, "nothing is stopped"
    (event,) = await events_of(service, jobs[5].id, "queue")
    assert event.message == "its array now runs at most 2 jobs at the same time"
    assert counts(await change(service, array_id, max_running=2)) == (0, 6, {})
    assert (await change(service, array_id, max_running=None)).array.max_running is None
