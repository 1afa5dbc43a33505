"""Queues with parents, with both databases: their positions in the tree, and what their rules
admit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dray.filters import AccountingFilter, JobFilter
from dray.queue_requests import QueueChangeRequest
from dray.requests import ArrayChangeRequest
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import queues as repository
from service.domain.errors import (
    InvalidQueue,
    PriorityTooHigh,
    QueueFull,
    QueueHoldsNoJobs,
    QueueInUse,
    RuntimeTooLong,
    Unsatisfiable,
)
from service.domain.scheduling.rules.queues import DEFAULT
from service.domain.scheduling.rules.tree import MAX_DEPTH, QueueTree
from service.jobs.accounting import Accounting
from service.jobs.array_changes import ArrayChanges
from service.outlook import answers
from tests.unit.service.helpers import Service
from tests.unit.service.jobs.test_bulk import bulk


async def change(service: Service, name: str, **changes: Any) -> None:
    await service.queues.change(name, QueueChangeRequest.model_validate(changes))


async def refused(service: Service, name: str, **rules: Any) -> tuple[str | None, str, str]:
    """Return the error for a queue with these rules, after checking that nothing was stored."""
    before = service.database.read_sync(repository.every)
    with pytest.raises(InvalidQueue) as told:
        await service.queue(name, **rules)
    assert service.database.read_sync(repository.every) == before
    return told.value.pointer, told.value.message, told.value.hint or ""


async def test_a_parent_is_shown_with_its_children_and_their_jobs(service: Service) -> None:
    await service.queue("lab", limit={"CPU": 8}, max_running=5)
    await service.queue("vision", parent="lab", quota={"CPU": 2}, borrowing_limit={"CPU": 1})
    await service.queue("text", parent="lab", lending_limit={"CPU": 0}, quota={"CPU": 1})
    job_id = await service.submit(queue="vision", resources={"num_workers": 2})
    assert service.claim(job_id, workers=2) is not None
    await service.submit(queue="text")
    lab, vision = await service.queues.get("lab"), await service.queues.get("vision")
    assert (lab.children, lab.parent, lab.users) == (["text", "vision"], None, [])
    assert (lab.num_waiting, lab.num_running, lab.holds) == (1, 1, {"CPU": 2.0})
    assert (vision.parent, vision.children, vision.borrowing_limit) == ("lab", [], {"CPU": 1.0})
    allowed = {each.resource: each for each in vision.allowed}
    of_cpu, of_jobs = allowed["CPU"], allowed["jobs"]
    assert (of_cpu.left, of_cpu.most, of_cpu.queue, of_cpu.rule) == (
        *(1.0, 3.0, "vision", "borrowing_limit"),
    )
    assert (of_jobs.left, of_jobs.queue, of_jobs.rule) == (4.0, "lab", "max_running")
    (of_text, _) = (await service.queues.get("text")).allowed
    assert (of_text.resource, of_text.left, of_text.queue, of_text.rule) == (
        *("CPU", 6.0, "lab", "limit"),
    )
    listed = {queue.name: queue.num_running for queue in (await service.queues.list()).items}
    assert listed == {DEFAULT: 0, "lab": 1, "text": 0, "vision": 1}


async def test_a_position_that_makes_no_sense_is_refused(service: Service) -> None:
    await service.queue("a")
    await service.queue("b", parent="a")
    await service.queue("c", parent="b")
    pointer, message, hint = await refused(service, "a", parent="c")
    assert pointer == "/parent"
    assert "forms a cycle" in message
    assert hint == "choose a parent that is not under 'a'"
    assert "forms a cycle" in (await refused(service, "a", parent="a"))[1]
    assert (await refused(service, "d", parent="nobody"))[1:] == (
        "there is no queue 'nobody'",
        "create it first with `dray queue set nobody`",
    )
    assert "holds jobs" in (await refused(service, "d", parent=DEFAULT))[1]
    await service.submit(queue="c")
    assert (await refused(service, "d", parent="c"))[1:] == (
        "1 job in the queue 'c' has not ended, but a parent queue can't hold jobs",
        "move or cancel these jobs first, or choose another parent",
    )


async def test_the_depth_is_bounded_also_for_a_subtree_that_moves(service: Service) -> None:
    for number in range(MAX_DEPTH):
        parent = {"parent": f"q{number - 1}"} if number else {}
        await service.queue(f"q{number}", **parent)
    last = f"q{MAX_DEPTH - 1}"
    assert f"{MAX_DEPTH + 1} levels" in (await refused(service, "deeper", parent=last))[1]
    await service.queue("other")
    assert f"{MAX_DEPTH + 1} levels" in (await refused(service, "q0", parent="other"))[1]
    await change(service, "q1", parent=None)
    await service.queue("q0", parent="other")


async def test_quotas_of_children_fit_into_the_quota_of_their_parent(service: Service) -> None:
    await service.queue("top", limit={"GPU": 10})
    await service.queue("lab", parent="top", quota={"GPU": 8})
    await service.queue("a", parent="lab", quota={"GPU": 5})
    pointer, message, hint = await refused(service, "b", parent="lab", quota={"GPU": 4})
    assert (pointer, message, hint) == (
        "/quota/GPU",
        "the quotas of the queues under 'lab' would add up to 9 GPU, but its quota is 8 GPU",
        "lower their quotas, or raise the quota of 'lab' to 9 GPU",
    )
    await service.queue("b", parent="lab", quota={"GPU": 3})
    pointer, message, _ = await refused(service, "lab", parent="top", quota={"GPU": 7})
    assert (pointer, "add up to 8 GPU" in message) == ("/quota/GPU", True)
    pointer, message, _ = await refused(service, "lab", parent="top", quota={"GPU": 11})
    assert "the quotas of the queues under 'top' would add up to 11 GPU" in message
    assert "but its limit is 10 GPU" in message
    await service.queue("c", quota={"GPU": 1})
    assert (await refused(service, "c", quota={"GPU": 1}, parent="lab"))[0] == "/quota/GPU"
    await service.queue("c", quota={"CPU": 1}, parent="lab")


async def test_limits_of_borrowing_and_lending_need_a_quota(service: Service) -> None:
    for rule in ("borrowing_limit", "lending_limit"):
        pointer, message, hint = await refused(service, "a", **{rule: {"GPU": 1}})
        assert (pointer, message) == (f"/{rule}/GPU", "the queue has no quota of this resource")
        assert hint == "also set a quota of GPU; it may be 0"
        await service.queue("a", quota={"GPU": 0}, **{rule: {"GPU": 1}})


async def test_a_queue_goes_only_after_its_children(service: Service) -> None:
    await service.queue("lab")
    await service.queue("vision", parent="lab")
    with pytest.raises(QueueInUse, match="is the parent of vision") as told:
        await service.queues.delete("lab")
    assert told.value.hint == (
        "first give them another parent: `dray queue set vision --parent none`"
    )
    await service.queues.delete("vision")
    await service.queues.delete("lab")


async def test_the_rules_of_a_parent_bind_the_jobs_of_its_children_together(
    service: Service,
) -> None:
    await service.queue(
        *("lab",), max_queued=2, max_priority=60, max_runtime_s=3600, limit={"CPU": 4}
    )
    for name in ("a", "b"):
        await service.queue(name, parent="lab", max_priority=90, max_runtime_s=7200)
    with pytest.raises(QueueHoldsNoJobs) as told:
        await service.submit(queue="lab")
    assert told.value.hint == "choose a queue under it: a, b"
    with pytest.raises(PriorityTooHigh):
        await service.submit(queue="a", priority=61)
    with pytest.raises(RuntimeTooLong, match="queue 'a' and the queues above it is 3600 s"):
        await service.submit(queue="a", max_runtime_s=3601)
    with pytest.raises(Unsatisfiable, match="the queue 'lab' has a limit of 4 CPU"):
        await service.submit(queue="a", resources={"num_workers": 5})
    one = await service.submit(queue="a")
    assert (await service.jobs.get(one)).max_runtime_s == 3600
    await service.submit(queue="b")
    with pytest.raises(QueueFull, match="2 jobs wait in the queue 'lab'"):
        await service.submit(queue="b")
    moved = await service.submit()
    with pytest.raises(QueueHoldsNoJobs):
        await service.change(moved, queue="lab")


@pytest.mark.parametrize("rule", ["max_queued", "max_queued_per_user"])
async def test_a_full_parent_lets_its_jobs_move_between_the_queues_under_it(
    service: Service, rule: str
) -> None:
    await service.queue("lab", **{rule: 5})
    for name in ("a", "b"):
        await service.queue(name, parent="lab")
    first, second = await service.submit(queue="a"), await service.submit(queue="a")
    array_id = (await service.jobs.get(await service.submit(queue="a", array={"size": 3}))).array_id
    await service.change(first, queue="b")
    await service.change(second, document={"max_retries": 2}, queue="b")
    arrays = ArrayChanges(service.database, service.settings, clock=lambda: service.now)
    to_b = ArrayChangeRequest(queue="b")
    assert array_id is not None
    assert (await arrays.change(array_id, to_b)).changed == 3
    for dry_run in (True, False):
        done = await bulk(
            service,
            "move",
            parameters={"queue": "a"},
            filter={"queue": "b"},
            dry_run=dry_run,
            max=5,
        )
        assert (done.changed, done.refused) == (5, 0)
    tree = QueueTree(service.database.read_sync(repository.every))

    def accepting(session: Session) -> list[str]:
        row = jobs_repository.get(session, first)
        assert row is not None
        found = answers.that_accept(session, tree, row, service.now)
        return [other.queue.name for other in found]

    assert service.database.read_sync(accepting) == ["b", "default"]
    outside = await service.submit()
    with pytest.raises(QueueFull, match="'lab'"):
        await service.change(outside, queue="b")
    await service.queue("a", parent="lab", **{rule: 5})
    await service.queue("b", parent="lab", **{rule: 0 if rule == "max_queued" else 1})
    with pytest.raises(QueueFull, match="'b'"):
        await arrays.change(array_id, to_b)


async def test_jobs_of_an_array_that_are_outside_a_full_parent_can_not_move_into_it(
    service: Service,
) -> None:
    await service.queue("lab", max_queued=3)
    for name in ("a", "b"):
        await service.queue(name, parent="lab")
    head = await service.jobs.get(await service.submit(queue="a", array={"size": 3}))
    await service.change(head.id, queue="default")
    await service.submit(queue="b")
    arrays = ArrayChanges(service.database, service.settings, clock=lambda: service.now)
    assert head.array_id is not None
    with pytest.raises(QueueFull, match="3 jobs wait in the queue 'lab'"):
        await arrays.change(head.array_id, ArrayChangeRequest(queue="b"))
    await service.queue("lab", max_queued=4)
    assert (await arrays.change(head.array_id, ArrayChangeRequest(queue="b"))).changed == 3


async def test_a_filter_by_a_parent_matches_the_jobs_under_it(service: Service) -> None:
    await service.queue("top")
    await service.queue("lab", parent="top")
    for name in ("a", "b"):
        await service.queue(name, parent="lab")
    inside = [await service.submit(queue="ab"[n % 2]) for n in range(7)]
    await service.submit()
    running = inside[:2]
    for job_id in running:
        assert service.claim(job_id) is not None

    async def listed(**wanted: Any) -> list[str]:
        """Return the ids of the matching jobs, fetched page by page, the oldest first."""
        found: list[str] = []
        cursor = None
        while True:
            page = await service.jobs.list(JobFilter(**wanted), limit=2, cursor=cursor)
            found += [job.id for job in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return found[::-1]

    for queue in ("lab", "top"):
        assert await listed(queue=queue) == inside
        assert await listed(queue=queue, state=("QUEUED", "STARTING")) == inside
        assert await listed(queue=queue, collapse_arrays=True) == inside
        assert await listed(queue=queue, state=("STARTING",)) == running
        assert await listed(queue=queue, where='state = "QUEUED"') == inside[2:]
    assert await listed(queue="a") == inside[::2]
    assert await listed(queue="la") == []

    async def accounted(queue: str) -> list[str]:
        service.advance(60)
        accounting = Accounting(service.database, clock=lambda: service.now)
        page = await accounting.page(AccountingFilter(queue=queue, per="job"), limit=9)
        return [row.job_id for row in page.items]

    assert await accounted("top") == running
    for job_id in running:
        service.end(job_id, 1)
        await service.jobs.delete(job_id)
    assert await accounted("top") == running
    assert await accounted("b") == running[1:]
    for dry_run in (True, False):
        done = await bulk(service, "cancel", filter={"queue": "lab"}, dry_run=dry_run)
        assert (done.changed, done.refused) == (5, 0)


async def test_changes_at_once_never_close_a_circle(service: Service) -> None:
    for number in range(6):
        a, b = f"a{number}", f"b{number}"
        await service.queue(a)
        await service.queue(b)
        await asyncio.gather(
            *(change(service, a, parent=b), change(service, b, parent=a)), return_exceptions=True
        )
    tree = QueueTree(service.database.read_sync(repository.every))
    for name, queue in tree.queues.items():
        assert queue.parent is None or tree.queues[queue.parent].parent is None, name
    assert sum(queue.parent is not None for queue in tree.queues.values()) == 6


async def test_children_that_are_made_at_once_never_share_a_quota(service: Service) -> None:
    await service.queue("lab", quota={"GPU": 8})
    made = (service.queue(f"q{n}", parent="lab", quota={"GPU": 3}) for n in range(6))
    ends = await asyncio.gather(*made, return_exceptions=True)
    assert sum(isinstance(end, InvalidQueue) for end in ends) == 4
    assert len((await service.queues.get("lab")).children) == 2


async def test_no_job_is_left_in_a_parent(service: Service) -> None:
    """A child is given to a queue while jobs are submitted to it."""
    for number in range(6):
        name = f"lab-{number}"
        await service.queue(name)
        submits = [service.submit(queue=name) for _ in range(6)]
        child = service.queue(f"child-{number}", parent=name)
        ends = await asyncio.gather(*submits[:3], child, *submits[3:], return_exceptions=True)
        jobs = [end for end in ends if isinstance(end, str)]
        has_child = bool((await service.queues.get(name)).children)
        assert has_child != bool(jobs), ends
        allowed = QueueHoldsNoJobs if has_child else InvalidQueue
        assert all(isinstance(end, allowed) for end in ends if isinstance(end, Exception)), ends


async def test_submits_at_once_never_overfill_a_parent(service: Service) -> None:
    await service.queue("lab", max_queued=5)
    for name in ("a", "b"):
        await service.queue(name, parent="lab")
    submits = (service.submit(queue="ab"[n % 2]) for n in range(16))
    ends = await asyncio.gather(*submits, return_exceptions=True)
    assert sum(isinstance(end, str) for end in ends) == 5
    assert all(isinstance(end, str | QueueFull) for end in ends)
