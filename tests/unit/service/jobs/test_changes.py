"""A waiting job is held, released, moved, and its priority is changed; events name the user."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause, Phase
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import planned_jobs
from service.domain.errors import (
    JobFinished,
    JobNotWaiting,
    NotFound,
    PriorityTooHigh,
    QueueFull,
    UnknownQueue,
    Unsatisfiable,
)
from service.domain.scheduling import policy
from service.lifecycle import transitions
from service.loops.shared import queue_view
from tests.marks import RULES
from tests.unit.service.helpers import Service, events_of, metrics

pytestmark = RULES


def order(service: Service) -> list[str]:
    """Return the waiting jobs in scheduling order."""
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    plan = policy.plan(policy.Snapshot(waiting, (), connected=False), service.now)
    return [decision.job_id for decision in plan]


async def test_a_held_job_says_who_holds_it_and_how_it_goes_on(service: Service) -> None:
    job_id = await service.submit()
    held = await service.change(job_id, held=True)
    assert (held.state, held.held_by, held.position) == (JobState.QUEUED, "ann", None)
    assert (held.reason.code, held.reason.message) == (
        "held",
        f"is held by ann; `dray release {job_id}` releases it",
    )
    told = await service.queries.explain(job_id)
    assert (told.reason, told.position) == (held.reason, None)
    released = await service.change(job_id, held=False)
    assert (released.held_by, released.reason.code) == (None, "released")
    events = await events_of(service, job_id, "queue")
    assert [(e.code, e.actor) for e in events] == [("held", "ann"), ("released", "ann")]
    note(service)
    assert (await service.queries.explain(job_id)).position == 1


async def test_a_held_job_is_not_ahead_of_others(service: Service) -> None:
    first, second = await service.submit(), await service.submit()
    await service.change(first, held=True)
    note(service)
    told = await service.queries.explain(second)
    assert (told.position, told.ahead) == (1, [])


async def test_a_plan_that_did_not_know_of_the_hold_does_not_hide_it(service: Service) -> None:
    job_id = await service.submit()
    (before,) = plan_of(service)
    await service.change(job_id, held=True)
    (after,) = plan_of(service)
    for wait, code in ((before, "held"), (after, "held")):
        service.database.write_sync(
            lambda s, wait=wait: transitions.note_waiting(s, [wait], service.now)
        )
        assert (await service.jobs.get(job_id)).reason.code == code


def plan_of(service: Service) -> list[policy.Wait]:
    """Make a plan for a node whose slots are all used by others."""
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    nodes = (policy.Node("n", {"CPU": 8.0}, {"CPU": 0.0}),)
    plan = policy.plan(policy.Snapshot(waiting, nodes, connected=True), service.now)
    return [decision for decision in plan if isinstance(decision, policy.Wait)]


def note(service: Service) -> None:
    """Store the plan as the scheduler would."""
    service.database.write_sync(
        lambda s: transitions.note_waiting(s, plan_of(service), service.now)
    )


async def test_the_jobs_ahead_are_those_that_the_plan_takes_first(service: Service) -> None:
    long, short = [await service.running() for _ in range(2)]
    for job_id, step in ((long, 10), (short, 50)):
        service.advance(100)
        service.report(job_id, 1, [metrics(step, {"x": 1.0}, total_steps=100)])
        service.end(job_id, 1, Cause.PREEMPTED)
    service.advance(60)
    note(service)
    told = await service.queries.explain(long)
    assert (told.position, [job.id for job in told.ahead]) == (2, [short])
    assert (await service.queries.explain(short)).position == 1


def waited_s(service: Service, job_id: str) -> float:
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    return next(job.waited_s for job in waiting if job.job_id == job_id)


async def test_time_in_which_a_job_was_held_is_no_waiting(service: Service) -> None:
    job_id = await service.submit()
    service.advance(100)
    await service.change(job_id, held=True)
    note(service)
    for _ in range(2):
        service.advance(1000)
        note(service)
    assert waited_s(service, job_id) == 100
    await service.change(job_id, held=False)
    note(service)
    service.advance(10)
    assert waited_s(service, job_id) == 110
    await service.change(job_id, held=True)
    note(service)
    service.advance(1000)
    await service.change(job_id, held=False)
    note(service)
    assert service.claim(job_id) is not None
    service.report(job_id, 1, phase=Phase.RUNNING)
    service.advance(50)
    service.end(job_id, 1, Cause.PREEMPTED)
    service.advance(7)
    assert waited_s(service, job_id) == 117


async def test_a_moved_job_no_longer_says_that_its_old_queue_keeps_it_back(
    service: Service,
) -> None:
    await service.queue("night")
    job_id = await service.submit(queue="night")
    note(service)
    assert (await service.jobs.get(job_id)).position == 1
    moved = await service.change(job_id, queue="default")
    assert (moved.reason.code, moved.reason.message, moved.position) == (
        "moved",
        "waits for the scheduler's next round",
        None,
    )
    held = await service.change(job_id, held=True)
    moved = await service.change(job_id, queue="night")
    assert moved.reason == held.reason


async def test_a_repeated_change_is_none(service: Service) -> None:
    job_id = await service.submit()
    for _ in range(2):
        await service.change(job_id, held=True, priority=60, queue="default", first=True)
    codes = [event.code for event in await events_of(service, job_id, "queue")]
    assert codes == ["priority", "held"]


async def test_a_change_wakes_the_scheduler_and_one_that_changes_nothing_does_not(
    service: Service,
) -> None:
    job_id = await service.submit()
    with service.database.signals.subscribe(QUEUE) as woken:
        await service.change(job_id, priority=51)
        assert await woken.wait(0)
        await service.change(job_id, priority=51)
        assert not await woken.wait(0)


async def test_a_job_moves_before_all_others_of_its_priority(service: Service) -> None:
    await service.queue("night")
    a, b, c = [await service.submit() for _ in range(3)]
    urgent = await service.submit(priority=90)
    other = await service.submit(queue="night")
    await service.change(c, first=True)
    await service.change(b, first=True)
    assert order(service) == [urgent, b, c, a, other]
    note(service)
    told = await service.queries.explain(a)
    assert (told.position, [job.id for job in told.ahead]) == (4, [urgent, b, c])
    await service.change(b, priority=51)
    await service.change(b, priority=50)
    assert order(service) == [urgent, c, a, b, other]


async def test_the_job_that_was_submitted_first_moves_before_those_with_less_work(
    service: Service,
) -> None:
    long, other = await service.submit(), await service.submit()
    for _ in range(2):
        moved = await service.change(long, first=True)
    assert [event.code for event in await events_of(service, long, "queue")] == ["moved_first"]
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    left_s = {long: 3600.0, other: None}
    jobs = tuple(replace(job, left_s=left_s[job.job_id]) for job in waiting)
    nodes = (policy.Node("n", {"CPU": 1.0}, {"CPU": 1.0}),)
    starts = policy.plan(policy.Snapshot(jobs, nodes, connected=True), service.now)[0]
    assert isinstance(starts, policy.Start)
    assert starts.job_id == moved.id


async def test_a_job_moves_to_another_queue_by_its_rules(service: Service) -> None:
    await service.queue("night", max_queued=1, max_priority=60, limit={"CPU": 2})
    job_id = await service.submit()
    moved = await service.change(job_id, queue="night")
    assert moved.queue == "night"
    (event,) = await events_of(service, job_id, "queue")
    assert (event.code, event.actor, event.data) == (
        *("moved", "ann"),
        {"from": "default", "to": "night"},
    )
    with pytest.raises(QueueFull):
        await service.change(await service.submit(), queue="night")
    await service.change(job_id, queue="default")
    with pytest.raises(PriorityTooHigh):
        await service.change(await service.submit(priority=70), queue="night")
    large = await service.submit(resources={"num_workers": 3})
    with pytest.raises(Unsatisfiable):
        await service.change(large, queue="night")
    with pytest.raises(UnknownQueue) as told:
        await service.change(job_id, queue="nigth", priority=70)
    assert told.value.hint == "did you mean 'night'?"
    assert (await service.jobs.get(job_id)).priority == 50


async def test_moves_at_once_never_overfill_a_queue(service: Service) -> None:
    await service.queue("night", max_queued=2)
    jobs = [await service.submit() for _ in range(6)]
    moves = (service.change(job_id, queue="night") for job_id in jobs)
    ends = await asyncio.gather(*moves, return_exceptions=True)
    assert sum(isinstance(end, QueueFull) for end in ends) == 4
    assert (await service.queues.get("night")).num_waiting == 2


async def test_an_admin_may_exceed_the_priority_of_the_queue(service: Service) -> None:
    await service.queue("default", max_priority=60)
    job_id = await service.submit(priority=60)
    with pytest.raises(PriorityTooHigh):
        await service.change(job_id, priority=61)
    assert (await service.change(job_id, priority=100, is_admin=True)).priority == 100
    await service.change(job_id, held=True)  # changes to other fields are still allowed


async def test_a_job_that_runs_takes_a_priority_and_nothing_else(service: Service) -> None:
    job_id = await service.running()
    assert (await service.change(job_id, priority=70)).priority == 70
    for change in ({"held": True}, {"held": False}, {"queue": "default"}, {"first": True}):
        with pytest.raises(JobNotWaiting, match="is RUNNING: only a waiting job"):
            await service.change(job_id, **change)
    await service.jobs.cancel(job_id)
    with pytest.raises(JobNotWaiting, match="is being cancelled"):
        await service.change(job_id, priority=80)


async def test_a_job_that_has_ended_takes_nothing(service: Service) -> None:
    job_id = await service.submit()
    await service.change(job_id, held=True)
    ended = await service.jobs.cancel(job_id)
    assert (ended.state, ended.held_by) == (JobState.CANCELLED, None)
    with pytest.raises(JobFinished):
        await service.change(job_id, priority=70)
    with pytest.raises(NotFound):
        await service.change("job-none", priority=70)


async def test_the_order_is_that_of_the_database(service: Service) -> None:
    a, b, c = [await service.submit() for _ in range(3)]
    await service.change(c, first=True)
    rows = service.database.read_sync(lambda s: planned_jobs.in_state(s, (JobState.QUEUED,)))
    assert [row.id for row in rows] == [c, a, b] == order(service)
