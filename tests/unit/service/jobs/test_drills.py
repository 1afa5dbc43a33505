"""Requests and results of preemption and drills, with each kind of database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dray.requests import DrillRequest
from dray.views import DrillKind, DrillState, JobState
from ray_workers.shared.commands import Drill, Leave
from ray_workers.shared.contracts import Cause
from service.db.repositories import jobs as repository
from service.domain.errors import (
    DrillImpossible,
    DrillNotFound,
    IdempotencyMismatch,
    JobNotRunning,
    NotFound,
)
from service.jobs.idempotency import IdempotencyKey
from service.loops.shared.queue_view import snapshot
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import (
    START,
    Service,
    drilled,
    events_of,
    metrics,
    regrouped,
    regrouping,
    resumed,
    two_ranks,
)

pytestmark = RULES


async def test_a_preemption_is_a_request_that_sql_keeps(service: Service) -> None:
    job_id = await service.running()
    before = await service.jobs.get(job_id)
    assert (await service.faults.preempt(job_id)).state is JobState.RUNNING
    await service.faults.preempt(job_id, 99.0)  # idempotent: the first grace period counts
    (asked,) = await events_of(service, job_id, "preempting")
    assert asked.data == {"grace_s": service.settings.preempt_grace_s}
    live = service.followed(job_id)
    assert live.commands == (Leave(service.settings.preempt_grace_s),)
    service.end(job_id, 1, Cause.PREEMPTED, "left its slots", [service.checkpoint(job_id, 1, 7)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code, job.priority) == (
        JobState.QUEUED,
        "preempted",
        before.priority,
    )
    retry = (await events_of(service, job_id))[-1]
    assert retry.data["charged_to"] == "free"
    claimed = service.claim(job_id, 1)
    assert claimed is not None
    assert [ref.step for ref in claimed.resume_from] == [7]
    live = service.followed(job_id)
    assert live.commands == ()


async def test_a_preempted_job_keeps_its_position(service: Service) -> None:
    first = await service.running()
    later = await service.submit()
    urgent = await service.submit(priority=90)
    await service.faults.preempt(first, 5.0)
    service.end(first, 1, Cause.PREEMPTED)
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert [job.job_id for job in waiting] == [urgent, first, later]


async def test_a_job_whose_document_this_release_refuses_is_not_drilled(service: Service) -> None:
    job_id = await service.running()

    def change(session: Session) -> None:
        job = repository.lock(session, job_id)
        assert job is not None
        job.spec = job.spec | {"schedule": "lottery"}

    service.database.write_sync(change)
    with pytest.raises(DrillImpossible, match="there is no field 'schedule'"):
        await service.faults.drill(job_id, asking(at_step=50))


async def test_a_cancel_wins_over_a_preemption(service: Service) -> None:
    job_id = await service.running()
    await service.faults.preempt(job_id)
    await service.jobs.cancel(job_id)
    with pytest.raises(JobNotRunning, match="CANCELLING"):
        await service.faults.preempt(job_id)
    service.end(job_id, 1, Cause.PREEMPTED, "left its slots as requested")
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.CANCELLED, "cancelled_by_user")


async def test_a_job_without_slots_can_not_be_preempted(service: Service) -> None:
    job_id = await service.submit()
    with pytest.raises(JobNotRunning, match="QUEUED: it holds no slots") as refused:
        await service.faults.preempt(job_id)
    assert refused.value.hint is not None
    service.claim(job_id)
    await service.faults.preempt(job_id)
    service.end(job_id, 1, Cause.SUCCEEDED)
    with pytest.raises(JobNotRunning, match="SUCCEEDED"):
        await service.faults.preempt(job_id)
    with pytest.raises(NotFound):
        await service.faults.preempt("job-none")


def asking(kind: str = "kill", **more: Any) -> DrillRequest:
    return DrillRequest.model_validate({"kind": kind, **more})


async def test_a_drill_that_is_mended_in_place_passes_by_what_is_told(service: Service) -> None:
    job_id = await two_ranks(service)
    drill = await service.faults.drill(job_id, asking(rank=1, at_step=50))
    assert (drill.state, drill.kind, drill.attempt) == (DrillState.WAITING, DrillKind.KILL, 1)
    assert drill.message == "to be injected when 50 steps are done"
    live = service.followed(job_id)
    assert live.commands == (Drill(drill.id, DrillKind.KILL, 1, 50),)
    service.report(job_id, 1, [drilled(drill.id, "struck", step=50, message="killed rank 1")])
    struck = await service.faults.get_drill(job_id, drill.id)
    assert (struck.state, struck.step, struck.finished_at) == (DrillState.STRUCK, 50, None)
    done = drilled(drill.id, "passed", step=50, recovery_s=0.414, steps_lost=0)
    service.report(job_id, 1, [regrouping(1), regrouped(1), done])
    passed = await service.faults.get_drill(job_id, drill.id)
    assert (passed.state, passed.recovery_s, passed.steps_lost) == (DrillState.PASSED, 0.414, 0)
    assert (passed.message, passed.finished_at) == ("recovered in 0.41 s, 0 steps lost", START)
    late = [drilled(drill.id, "failed", message="no"), drilled(drill.id, "struck")]
    service.report(job_id, 1, late)
    assert await service.faults.get_drill(job_id, drill.id) == passed
    assert (await service.faults.drills(job_id)).items == [passed]
    codes = [event.code for event in await events_of(service, job_id, "drill")]
    assert codes == ["drill_waiting", "drill_struck", "drill_passed"]
    live = service.followed(job_id)
    assert live.commands == ()


async def test_a_kill_of_a_script_that_recovers_in_place_passes_by_what_is_told(
    service: Service,
) -> None:
    job_id = await two_ranks(service, **SCRIPT)
    drill = await service.faults.drill(job_id, asking(rank=1))
    service.report(job_id, 1, [drilled(drill.id, "struck", message="killed rank 1")])
    done = drilled(drill.id, "passed", step=50, recovery_s=0.414, steps_lost=0)
    service.report(job_id, 1, [regrouping(1), regrouped(1), done])
    passed = await service.faults.get_drill(job_id, drill.id)
    assert (passed.state, passed.recovery_s, passed.steps_lost) == (DrillState.PASSED, 0.414, 0)


async def test_a_script_that_reports_steps_is_drilled_at_one_of_them(service: Service) -> None:
    job_id = await service.running(**SCRIPT)
    with pytest.raises(DrillImpossible, match="has not reported a step yet"):
        await service.faults.drill(job_id, asking(at_step=50))
    service.report(job_id, 1, [metrics(12, {"x": 1.0})])
    with pytest.raises(DrillImpossible, match="already completed 12 steps"):
        await service.faults.drill(job_id, asking(at_step=12))
    drill = await service.faults.drill(job_id, asking(at_step=50))
    live = service.followed(job_id)
    assert live.commands == (Drill(drill.id, DrillKind.KILL, 0, 50),)


@pytest.mark.parametrize("struck", [True, False])
async def test_a_drill_whose_attempt_ended_has_failed(service: Service, struck: bool) -> None:
    job_id = await two_ranks(service, max_retries=0)
    drill = await service.faults.drill(job_id, asking(at_step=50))
    frames = [drilled(drill.id, "struck", step=50)] if struck else []
    service.end(job_id, 1, Cause.USER_ERROR, "rank 0 fell", frames)
    failed = await service.faults.get_drill(job_id, drill.id)
    assert failed.state is DrillState.FAILED
    assert "rank 0 fell" in failed.message
    assert ("not recover in place" if struck else "never injected") in failed.message
    # The failure caused by the drill does not count against the user; a failure of the user does.
    state = (await service.jobs.get(job_id)).state
    assert state is (JobState.QUEUED if struck else JobState.FAILED)


@pytest.mark.parametrize("told_of", [True, False])
async def test_a_preemption_drill_passes_with_the_next_attempts_first_step(
    service: Service, told_of: bool
) -> None:
    job_id = await two_ranks(service)
    drill = await service.faults.drill(job_id, asking("preempt"))
    service.advance(10)
    struck = drilled(drill.id, "struck", step=12, at=service.now)
    frames = [metrics(12, {"x": 1.0}), service.checkpoint(job_id, 1, 11)]
    service.end(job_id, 1, Cause.PREEMPTED, "left", [*frames, *([struck] if told_of else [])])
    waiting = await service.faults.get_drill(job_id, drill.id)
    assert (waiting.state, waiting.step) == (DrillState.STRUCK, 12)
    service.claim(job_id, 1, workers=2)
    service.end(job_id, 2, Cause.NODE_LOST, "fell before its first step")
    service.claim(job_id, 2, workers=2)
    service.advance(4)
    at = service.now + timedelta(seconds=1.5)
    service.advance(2)
    service.report(job_id, 3, [resumed(11), metrics(12, {"x": 1.0}, at=at)])
    passed = await service.faults.get_drill(job_id, drill.id)
    assert (passed.state, passed.recovery_s, passed.steps_lost) == (DrillState.PASSED, 5.5, 1)
    assert passed.message == "recovered in 5.50 s, 1 step lost"


SCRIPT: dict[str, Any] = {"recipe": None, "script": {"entrypoint": "train.py"}}
UNMENDED: dict[str, dict[str, Any]] = {
    "a single rank": {"resources": {"num_workers": 1}},
    "balanced GPUs": {
        "resources": {"num_workers": 2, "gpus_per_worker": 1},
        "parallel": {"balance": "auto"},
    },
    "a sharded model": {
        "parallel": {"shard": 2},
        "checkpoint": {"in_memory": "off"},
    },
    "ranks that step by themselves": {"sync": {"every": 4}},
}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (SCRIPT, "kill"),
        (SCRIPT, "stall"),
        *((fields, kind) for fields in UNMENDED.values() for kind in ("kill", "stall")),
    ],
    ids=[
        "a script, kill",
        "a script, stall",
        *(f"{name}, {kind}" for name in UNMENDED for kind in ("kill", "stall")),
    ],
)
@ON_SQLITE
async def test_what_is_not_mended_in_place_passes_a_drill_when_it_is_started_again(
    service: Service, fields: dict[str, Any], kind: str
) -> None:
    job_id = await two_ranks(service, max_retries=0, **fields)
    drill = await service.faults.drill(job_id, asking(kind))
    lost = drilled(drill.id, "failed", message="the group did not recover in place")
    struck = drilled(drill.id, "struck", at=service.now)
    service.end(job_id, 1, Cause.USER_ERROR, "killed", [struck, lost])
    assert (await service.jobs.get(job_id)).state is JobState.QUEUED
    service.claim(job_id, 1, workers=2)
    service.advance(3)
    service.report(job_id, 2)
    passed = await service.faults.get_drill(job_id, drill.id)
    assert (passed.state, passed.recovery_s) == (DrillState.PASSED, 3.0)


@pytest.mark.parametrize("how", ["cancelled", "preempted first", "cancelled in the queue"])
async def test_a_preemption_drill_of_a_job_that_does_not_come_back_has_failed(
    service: Service, how: str
) -> None:
    job_id = await two_ranks(service)
    drill = await service.faults.drill(job_id, asking("preempt"))
    if how == "cancelled":
        await service.jobs.cancel(job_id)
        service.end(job_id, 1, Cause.STOPPED, "stopped as requested")
    elif how == "preempted first":
        await service.faults.preempt(job_id)
        service.end(job_id, 1, Cause.PREEMPTED, "left")
    else:
        service.end(job_id, 1, Cause.PREEMPTED, "left")
        await service.jobs.cancel(job_id)
    failed = await service.faults.get_drill(job_id, drill.id)
    assert failed.state is DrillState.FAILED
    assert failed.finished_at is not None


async def test_one_key_makes_one_drill_and_stands_for_nothing_else(service: Service) -> None:
    job_id = await two_ranks(service)
    key = IdempotencyKey("k", "this request")
    first = await service.faults.drill(job_id, asking(), idempotency=key)
    service.end(job_id, 1, Cause.SUCCEEDED)
    again = await service.faults.drill(job_id, asking(), idempotency=key)
    assert again.id == first.id
    assert len((await service.faults.drills(job_id)).items) == 1
    other = IdempotencyKey("k", "another request")
    with pytest.raises(IdempotencyMismatch):
        await service.faults.drill(job_id, asking("stall"), idempotency=other)
    with pytest.raises(JobNotRunning):
        await service.faults.drill(job_id, asking(), idempotency=IdempotencyKey("new", "x"))


async def test_a_job_that_does_not_train_takes_no_drill(service: Service) -> None:
    job_id = await service.submit()
    with pytest.raises(JobNotRunning, match="QUEUED"):
        await service.faults.drill(job_id, asking())
    service.claim(job_id)
    with pytest.raises(JobNotRunning, match="STARTING"):
        await service.faults.drill(job_id, asking())
    service.report(job_id, 1)
    service.report(job_id, 1, [regrouping(0)])
    await service.faults.drill(job_id, asking())
    with pytest.raises(NotFound):
        await service.faults.drill("job-none", asking())
    for drill_id in ("drill-none", "\0"):
        with pytest.raises(DrillNotFound):
            await service.faults.get_drill(job_id, drill_id)


async def test_a_step_that_is_past_is_that_of_this_attempt(service: Service) -> None:
    job_id = await two_ranks(service)
    with pytest.raises(DrillImpossible) as past:
        await service.faults.drill(job_id, asking(at_step=10))
    assert past.value.pointer == "/at_step"
    service.end(job_id, 1, Cause.NODE_LOST)
    service.claim(job_id, 1, workers=2)
    service.report(job_id, 2, [resumed(4), metrics(5, {"x": 1.0}, total_steps=100)])
    await service.faults.drill(job_id, asking(at_step=10))
