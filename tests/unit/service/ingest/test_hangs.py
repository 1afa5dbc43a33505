"""Hang reports and the use of slots are stored, limited, shown, and counted."""

from __future__ import annotations

import pytest

from ray_workers.shared.contracts import Cause
from ray_workers.shared.heartbeat import TimeCategory
from service.db.repositories import faults as repository
from service.domain.errors import (
    NotFound,
)
from service.ingest import hangs
from tests.unit.service.helpers import (
    START,
    Service,
    events_of,
    hang,
    metrics,
    spent,
    two_ranks,
)


async def test_a_hang_is_told_of_with_everything_and_outlives_the_cluster(service: Service) -> None:
    job_id = await two_ranks(service)
    service.report(job_id, 1, [hang(1, stack="File a\nNUL \0 and \ud800")])
    service.end(job_id, 1, Cause.SUCCEEDED)
    (bundle,) = (await service.faults.hangs(job_id)).items
    assert (bundle.seq, bundle.attempt, bundle.time) == (1, 1, START)
    assert (bundle.culprits, bundle.step, bundle.phase) == ([1], 50, "data_wait")
    assert (bundle.waited_s, bundle.limit_s) == (12.34, 4.0)
    assert [rank.stack for rank in bundle.ranks] == ["File a\nNUL ␀ and ?"] * 2
    assert (bundle.ranks[0].collective, bundle.ranks[0].since_s) == (7, 9.5)
    (event,) = await events_of(service, job_id, "hang")
    said = "rank 1 stood still for 12.3 s in data_wait at step 50 (the limit is 4.0 s)"
    where = f"`dray hangs {job_id}` shows where each rank was when it hung"
    assert event.message == f"{said}; {where}"
    assert (await service.queries.explain(job_id)).reason.message.endswith(where)
    assert event.data["culprits"] == [1]
    await service.jobs.delete(job_id)
    with pytest.raises(NotFound):
        await service.faults.hangs(job_id)
    assert service.database.read_sync(lambda s: repository.hangs(s, job_id)) == []


async def test_bundles_are_bounded_in_number_and_in_size(service: Service) -> None:
    job_id = await service.running()
    number = hangs.KEPT_OF_A_JOB + 3
    for n in range(number):
        service.report(job_id, 1, [hang(0, step=n)])
    kept = (await service.faults.hangs(job_id)).items
    assert [bundle.seq for bundle in kept] == list(range(4, number + 1))
    service.report(job_id, 1, [hang(0, stack="begin" + "☂" * hangs.MAX_STACK_BYTES + "end")])
    stack = (await service.faults.hangs(job_id)).items[-1].ranks[0].stack
    assert stack is not None
    assert len(stack.encode()) <= hangs.MAX_STACK_BYTES
    assert stack.startswith("begin")
    assert stack.endswith("end")
    assert "cut here" in stack


async def test_of_too_many_stacks_the_stacks_of_the_culprits_are_kept(service: Service) -> None:
    num_ranks = 2 * hangs.MAX_BUNDLE_BYTES // hangs.MAX_STACK_BYTES
    job_id = await service.submit(resources={"num_workers": num_ranks})
    service.claim(job_id, workers=num_ranks)
    stack = "x" * hangs.MAX_STACK_BYTES
    frames = [hang(num_ranks - 1, num_ranks=num_ranks, stack=stack), metrics(1, {"x": 1.0})]
    service.report(job_id, 1, frames)
    (bundle,) = (await service.faults.hangs(job_id)).items
    assert len(bundle.ranks) == num_ranks
    assert bundle.ranks[-1].stack == stack
    held = sum(len(rank.stack or "") for rank in bundle.ranks)
    assert held <= hangs.MAX_BUNDLE_BYTES


async def test_the_newest_ledger_of_each_attempt_is_summed(service: Service) -> None:
    job_id = await service.running()
    assert (await service.jobs.get(job_id)).goodput is None
    service.report(job_id, 1, [spent(useful=1.0), spent(useful=2.0, starting=1.0)])
    service.report(job_id, 1, [spent(useful=5.5, starting=1.0, idle=0.5)])
    service.end(job_id, 1, Cause.PREEMPTED, "left", [spent(useful=6.0, starting=1.0, idle=1.0)])
    service.claim(job_id, 1)
    service.report(job_id, 2, [spent(useful=2.0, recomputed=4.0)])
    goodput = (await service.jobs.get(job_id)).goodput
    assert goodput is not None
    shown = goodput.slot_seconds
    assert (shown.useful, shown.recomputed, shown.starting, shown.idle) == (8.0, 4.0, 1.0, 1.0)
    assert (goodput.total, goodput.useful_share) == (14.0, round(8 / 14, 4))
    assert sum(seconds for _, seconds in shown) == goodput.total


async def test_slot_seconds_of_all_jobs_are_counted_and_outlive_them(service: Service) -> None:
    for useful in (3.0, 4.0):
        job_id = await service.running()
        service.report(job_id, 1, [spent(useful=1.0, idle=2.0)])
        service.end(job_id, 1, Cause.SUCCEEDED, "done", [spent(useful=useful, idle=1.5)])
    await service.jobs.delete(job_id)
    assert await service.faults.slot_seconds() == {"useful": 7.0, "idle": 4.0}


async def test_what_a_dead_supervisor_held_after_its_last_word_is_idle(service: Service) -> None:
    job_id = await service.submit(resources={"num_workers": 2})
    service.claim(job_id, workers=2)
    service.report(job_id, 1, [metrics(1, {"x": 1.0})])
    service.advance(10)
    service.report(job_id, 1, [spent(useful=20.0, at=service.now)])
    service.advance(5)
    service.end(job_id, 1, Cause.SUPERVISOR_LOST, "gone")
    goodput = (await service.jobs.get(job_id)).goodput
    assert goodput is not None
    assert goodput.slot_seconds.idle == 10.0  # two slots for five seconds
    assert goodput.total == 30.0
    counted = await service.faults.slot_seconds()
    assert counted == {TimeCategory.USEFUL: 20.0, TimeCategory.IDLE: 10.0}
