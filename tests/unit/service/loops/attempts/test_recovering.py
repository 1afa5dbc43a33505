"""A group that recovers in place: the job's state, its events, and each step once (I5)."""

from __future__ import annotations

from typing import Any

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause, Frame, FrameKind, Phase
from service.telemetry.series_filters import MetricsFilter
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import (
    Service,
    events_of,
    frame,
    log,
    metrics,
    regrouped,
    regrouping,
    told,
)

pytestmark = RULES


async def moves(service: Service, job_id: str) -> list[tuple[Any, Any, str]]:
    return [
        (event.from_state, event.to_state, event.code)
        for event in await events_of(service, job_id, "state")
    ]


async def test_a_loss_makes_it_recover_and_the_repair_makes_it_run(service: Service) -> None:
    job_id = await service.running(resources={"num_workers": 2})
    service.report(job_id, 1, [regrouping(1)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.recoveries) == (JobState.RECOVERING, 0)
    assert (job.reason.code, job.reason.message) == ("group_lost", "rank 1 was killed")
    service.report(job_id, 1, [regrouped(1)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.recoveries, job.world_size) == (JobState.RUNNING, 1, 2)
    assert (await service.jobs.list()).items[0].recoveries == 1
    lost, mended = (await events_of(service, job_id))[-2:]
    assert lost.data == {"ranks": [1], "generation": 1, "how": "killed"}
    assert mended.code == "recovered"
    assert mended.message == "recovered in 0.41 s, 0 steps lost; trains again on 2 workers"
    assert mended.data == {
        "recovery_s": 0.414,
        "steps_lost": 0,
        "step": 50,
        "ranks": [1],
        "generation": 1,
        "world_size": 2,
    }


async def test_a_loss_and_its_repair_in_one_reply_are_both_told_in_order(service: Service) -> None:
    """This includes the first step, which the job had not completed before this reply."""
    job_id = await service.submit()
    service.claim(job_id)
    twice = [regrouping(1), regrouped(1), regrouping(0, generation=2), regrouped(0, generation=2)]
    service.report(job_id, 1, [*twice, metrics(1, {"loss": 1.0})], phase=Phase.STARTING)
    assert (await moves(service, job_id))[2:] == [
        (JobState.STARTING, JobState.RUNNING, "running"),
        (JobState.RUNNING, JobState.RECOVERING, "group_lost"),
        (JobState.RECOVERING, JobState.RUNNING, "recovered"),
        (JobState.RUNNING, JobState.RECOVERING, "group_lost"),
        (JobState.RECOVERING, JobState.RUNNING, "recovered"),
    ]
    assert (await service.jobs.get(job_id)).recoveries == 2


async def test_the_phase_alone_moves_no_job_that_runs(service: Service) -> None:
    job_id = await service.running()
    for phase in (Phase.STARTING, Phase.RUNNING):
        service.report(job_id, 1, phase=phase)
        assert (await service.jobs.get(job_id)).state is JobState.RUNNING
    service.report(job_id, 1, [regrouping(0)])
    service.report(job_id, 1, phase=Phase.RUNNING)
    assert (await service.jobs.get(job_id)).state is JobState.RECOVERING


async def test_losses_that_move_no_state_are_told_of_all_the_same(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    service.report(job_id, 1, [regrouping(1), regrouped(1)], phase=Phase.STARTING)
    job = await service.jobs.get(job_id)
    assert (job.state, job.recoveries) == (JobState.STARTING, 1)
    service.report(job_id, 1, [metrics(1, {"loss": 1.0})])
    service.report(job_id, 1, [regrouping(1), regrouping(0, 1, generation=2)])
    assert (await service.jobs.get(job_id)).state is JobState.RECOVERING
    await service.jobs.cancel(job_id)
    service.report(job_id, 1, [regrouped(0, 1, generation=2, world_size=1)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.recoveries, job.world_size) == (JobState.CANCELLING, 2, 1)
    remarks = await events_of(service, job_id, "regrouping", "regrouped")
    assert [event.type for event in remarks] == [
        *("regrouping", "regrouped"),
        *("regrouping", "regrouped"),
    ]


async def test_a_job_that_was_being_mended_ends_as_any_other(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [regrouping(0)])
    service.end(job_id, 1, Cause.WORKER_LOST, "no replacement", [regrouping(0, generation=2)])
    assert (await service.jobs.get(job_id)).state is JobState.QUEUED


async def test_what_a_job_waits_for_at_its_end_is_an_event(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [told(FrameKind.WAITING, {"message": "the disk is full"})])
    (event,) = await events_of(service, job_id, "waiting")
    assert (event.code, event.message) == ("waiting", "the disk is full")
    assert (await service.jobs.get(job_id)).state is JobState.RUNNING


BAD = [
    frame(FrameKind.REGROUPING, {"generation": 1, "ranks": [0], "code": "killed"}),  # from a rank
    frame(FrameKind.LEDGER, {"slot_seconds": {"useful": 1.0}}, rank=3),
    told(FrameKind.REGROUPING, {}),
    told(FrameKind.REGROUPING, {"generation": -1, "ranks": [0]}),
    told(FrameKind.REGROUPING, {"generation": 1, "ranks": ["0"]}),
    told(FrameKind.REGROUPING, {"generation": 1, "ranks": {}}),
    told(FrameKind.REGROUPED, {"generation": 1, "ranks": [0], "world_size": 0}),
    told(FrameKind.REGROUPED, {"generation": 1, "ranks": [0], "world_size": 10**9}),
    told(FrameKind.REGROUPED, {"generation": 1, "ranks": [], "world_size": 1, "recovery_s": -1}),
    told(FrameKind.HANG, {"culprits": [0]}),
    told(FrameKind.HANG, {"culprits": [0], "ranks": [{"stack": "x"}]}),
    told(FrameKind.HANG, {"culprits": [0], "ranks": ["rank 0"]}),
    told(FrameKind.HANG, {"culprits": [0], "ranks": [], "waited_s": float("nan")}),
    told(FrameKind.DRILL, {"id": "drill-none", "state": "passed"}),
    told(FrameKind.DRILL, {"id": "drill-none\0", "state": "passed"}),
    told(FrameKind.LEDGER, {}),
    told(FrameKind.LEDGER, {"slot_seconds": {"usefull": 1.0}}),
    told(FrameKind.LEDGER, {"slot_seconds": [1.0]}),
]


@pytest.mark.parametrize("bad", BAD, ids=str)
@ON_SQLITE
async def test_what_no_supervisor_can_mean_is_refused_and_said(
    service: Service, bad: Frame
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [bad, log(0, "hello")])
    job = await service.jobs.get(job_id)
    assert (job.state, job.recoveries, job.goodput) == (JobState.RUNNING, 0, None)
    (refused,) = await events_of(service, job_id, "frames_refused")
    assert str(bad.kind) in refused.message
    assert (await service.faults.hangs(job_id)).items == []
    assert [line.text for line in (await service.queries.logs(job_id)).items] == ["hello"]


async def test_each_step_is_served_once_over_replacements(service: Service) -> None:
    """This holds for any replaced rank, and for any repetitions and order of reports."""
    job_id = await service.running(resources={"num_workers": 2})
    first = [metrics(step, {"x": float(step)}, rank=rank) for step in (1, 2) for rank in (0, 1)]
    service.report(job_id, 1, first)
    again = [
        metrics(2, {"x": 2.0}, rank=1, incarnation=1),
        metrics(3, {"x": 3.0}, rank=1, incarnation=1),
        metrics(2, {"x": 2.0}, rank=0),  # a survivor repeats its evaluation
        metrics(3, {"x": 3.0}, rank=0),
    ]
    service.report(job_id, 1, [regrouping(1), regrouped(1), *again])
    service.report(job_id, 1, [metrics(3, {"x": 3.0}, incarnation=1)])
    for rank in (0, 1):
        series = (await service.queries.metrics(job_id, MetricsFilter(rank=rank))).series["x"]
        assert (series.steps, series.values) == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert await events_of(service, job_id, "metric_steps_repeated") == []
    job = await service.jobs.get(job_id)
    assert job.progress is not None
    assert job.progress.step == 3


async def test_last_words_of_a_rank_come_before_its_replacements_first(service: Service) -> None:
    job_id = await service.running()
    frames = [
        metrics(3, {"x": 3.0}, incarnation=10),
        metrics(2, {"x": 2.0}, incarnation=2),
        metrics(1, {"x": 1.0}),
    ]
    service.report(job_id, 1, frames)
    assert (await service.queries.metrics(job_id)).series["x"].steps == [1, 2, 3]


async def test_progress_does_not_go_back_by_what_is_told_again(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(7, {"x": 1.0}, total_steps=10)])
    service.report(job_id, 1, [metrics(6, {"x": 1.0}, incarnation=1)])
    progress = (await service.jobs.get(job_id)).progress
    assert progress is not None
    assert (progress.step, progress.total_steps) == (7, 10)


async def test_a_log_in_which_a_replacement_spoke_first_claims_no_gap(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "a"), log(0, "new", incarnation=1)])
    service.report(job_id, 1, [log(1, "late"), log(1, "newer", incarnation=1)])
    service.report(job_id, 1, [log(3, "after a gap", incarnation=1)])
    lines = [line.text for line in (await service.queries.logs(job_id)).items]
    assert lines[:4] == ["a", "new", "late", "newer"]
    assert "1 lines were lost" in lines[4]
