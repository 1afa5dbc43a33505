"""A supervisor's reports are stored once, fenced, and change the job's state according to the state
table."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause, FrameKind, Outcome, Phase, PollReply
from ray_workers.training.scripts.prepared_script import ScriptDiffersError
from service.ingest import attempt_results
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import (
    SHA,
    START,
    Service,
    events_of,
    frame,
    log,
    metrics,
    resumed,
    spent,
)

pytestmark = RULES


async def everything(service: Service, job_id: str) -> dict[str, Any]:
    """Everything that can be read about a job."""
    queries = service.queries
    return {
        "job": (await service.jobs.get(job_id)).model_dump(),
        "metrics": (await queries.metrics(job_id)).model_dump(),
        "logs": (await queries.logs(job_id)).model_dump(),
        "events": (await queries.events(job_id)).model_dump(),
        "attempts": (await queries.attempts(job_id)).model_dump(),
        "checkpoints": (await queries.checkpoints(job_id)).model_dump(),
        "artifacts": (await queries.artifacts(job_id)).model_dump(),
    }


def full_reply(service: Service, job_id: str, attempt: int = 1) -> PollReply:
    return service.reply(
        job_id,
        attempt,
        [
            resumed(0),
            metrics(1, {"train/loss": 2.0}, total_steps=10, epoch=0, samples_per_s=50.0),
            log(0, "hello"),
            service.checkpoint(job_id, attempt, 1),
            service.artifact(job_id, attempt, "model.safetensors"),
            frame(FrameKind.ERROR, {"cause": "user_error", "type": "ValueError", "message": "no"}),
        ],
    )


async def test_a_reply_that_comes_twice_is_stored_once(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    reply = full_reply(service, job_id)
    assert service.store(job_id, 1, reply) == attempt_results.Recorded(True, True, reply.cursor)
    before = await everything(service, job_id)
    assert service.store(job_id, 1, reply) == attempt_results.Recorded(False, True, reply.cursor)
    assert await everything(service, job_id) == before
    loss = before["metrics"]["series"]["train/loss"]
    assert (loss["steps"], loss["values"]) == ([1], [2.0])
    assert [line["text"] for line in before["logs"]["items"]] == ["hello"]


async def test_a_reply_from_an_older_cursor_changes_nothing(service: Service) -> None:
    job_id = await service.running()
    old = service.reply(job_id, 1, [log(0, "old")])
    service.report(job_id, 1, [log(0, "first")])
    before = await everything(service, job_id)
    assert not service.store(job_id, 1, old).changed
    mixed = service.reply(job_id, 1, [log(1, "overlaps")])
    assert not service.store(job_id, 1, mixed, asked={"rank-0": 100}).changed
    assert await everything(service, job_id) == before


DIVERGES = {"step": 7, "loss": float("nan"), "grad_norm": float("inf"), "then": "rollback"}


async def test_the_first_step_that_is_not_finite_is_an_event_and_a_warning(
    service: Service,
) -> None:
    job_id = await service.running()
    assert (await service.jobs.get(job_id)).warnings == []
    service.report(job_id, 1, [frame(FrameKind.DIVERGENCE, DIVERGES)])
    events = (await service.queries.events(job_id)).items
    (event,) = [event for event in events if event.type == "divergence"]
    assert event.data == {"step": 7, "loss": "NaN", "grad_norm": "Infinity"}
    service.end(job_id, 1)
    (warning,) = (await service.jobs.get(job_id)).warnings
    assert warning.code == "diverges"
    assert "the loss of step 7 is NaN and its gradient norm is Infinity" in warning.message


COPIES = {"step": 150, "state_bytes": 6 << 30, "worker_bytes": 3 << 29}


async def test_the_newest_complete_copy_in_memory_is_shown_while_the_job_has_slots(
    service: Service,
) -> None:
    job_id = await service.running()
    assert (await service.jobs.get(job_id)).memory_copies is None
    for step in (100, 150):
        service.report(job_id, 1, [frame(FrameKind.MEMORY_COPIES, {**COPIES, "step": step})])
    copies = (await service.jobs.get(job_id)).memory_copies
    assert copies is not None
    assert copies.model_dump() == COPIES
    (listed,) = (await service.jobs.list()).items
    assert listed.memory_copies == copies
    explained = await service.queries.explain(job_id)
    assert explained.reason.message.endswith(
        "the state after step 150 is kept in the memory of the workers (6.0 GiB; the copies use up "
        "to 1.5 GiB on a worker)"
    )
    service.end(job_id, 1, Cause.WORKER_LOST)
    assert (await service.jobs.get(job_id)).memory_copies is None
    assert "in the memory" not in (await service.queries.explain(job_id)).reason.message
    service.now += timedelta(hours=1)
    assert service.claim(job_id, 1) is not None
    service.report(job_id, 2)
    assert (await service.jobs.get(job_id)).memory_copies is None


@pytest.mark.parametrize(
    "body",
    [{}, COPIES | {"step": -1}, COPIES | {"state_bytes": 1e400}, COPIES | {"worker_bytes": "1"}],
    ids=str,
)
async def test_a_bad_report_of_copies_is_refused(service: Service, body: dict[str, Any]) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [frame(FrameKind.MEMORY_COPIES, body)])
    assert (await service.jobs.get(job_id)).memory_copies is None


async def test_a_group_that_keeps_no_copies_in_memory_adds_an_event(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [frame(FrameKind.MEMORY_COPIES, COPIES)])
    body = {"message": "the copies do not fit"}
    service.report(job_id, 1, [frame(FrameKind.NO_MEMORY_COPIES, body)])
    (event,) = await events_of(service, job_id, "no_memory_copies")
    assert event.message == "the copies do not fit"
    assert (await service.jobs.get(job_id)).memory_copies is None


async def test_an_evaluation_that_is_not_finite_is_an_event_and_a_warning(
    service: Service,
) -> None:
    job_id = await service.running()
    found = {"step": 8, "loss": float("nan"), "grad_norm": None, "then": "fail"}
    service.report(job_id, 1, [frame(FrameKind.DIVERGENCE, found)])
    events = (await service.queries.events(job_id)).items
    (event,) = [event for event in events if event.type == "divergence"]
    assert event.data == {"step": 8, "val_loss": "NaN"}
    (warning,) = (await service.jobs.get(job_id)).warnings
    assert "val/loss after step 8 is NaN" in warning.message


async def test_a_rollback_halves_the_rate_three_times_and_is_charged_to_nobody(
    service: Service,
) -> None:
    job_id = await service.submit(train={"on_divergence": "rollback"}, max_retries=0)
    for attempt in (1, 2, 3):
        claimed = service.claim(job_id, attempt - 1)
        assert claimed is not None
        assert claimed.spec["train"]["optimizer"]["lr"] == 1e-3 * 0.5 ** (attempt - 1)
        service.report(job_id, attempt, [service.checkpoint(job_id, attempt, attempt)])
        service.end(job_id, attempt, Cause.DIVERGED, "training diverged")
        job = await service.jobs.get(job_id)
        assert (job.state, job.reason.code) == (JobState.QUEUED, "diverged")
        assert f"rollback {attempt} of 3" in job.reason.message
    claimed = service.claim(job_id, 3)
    assert claimed is not None
    assert [ref.step for ref in claimed.resume_from] == [3, 2, 1]
    assert job.spec["train"]["optimizer"]["lr"] == 1e-3, "the document does not change"
    service.report(job_id, 4)
    service.end(job_id, 4, Cause.DIVERGED, "training diverged")
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "diverged")


async def test_a_script_whose_loss_is_not_finite_has_an_event_and_a_warning_once_per_attempt(
    service: Service,
) -> None:
    nan = float("nan")
    job_id = await service.running(recipe=None, script={"entrypoint": "/train.py"}, max_retries=3)
    ours = [metrics(n, {"train/loss": 1.0, "train/grad_norm": 1e308}) for n in (1, 2)]
    peer = metrics(3, {"train/loss": nan}, rank=1)
    service.report(job_id, 1, [*ours, peer, metrics(3, {"val/loss": nan})])
    assert await events_of(service, job_id, "divergence") == []
    bad = [(4, 0.5, float("inf")), (5, nan, nan), (6, nan, 1.0)]
    frames = [metrics(n, {"train/loss": loss, "train/grad_norm": norm}) for n, loss, norm in bad]
    service.report(job_id, 1, frames)
    service.report(job_id, 1, [metrics(7, {"train/loss": nan, "x": 1})])
    (event,) = await events_of(service, job_id, "divergence")
    message = "train/grad_norm of step 4 is Infinity: training diverges, and the script continues"
    assert (event.code, event.message) == ("diverges", message)
    assert event.data == {"step": 4, "loss": 0.5, "grad_norm": "Infinity"}
    (warning,) = (await service.jobs.get(job_id)).warnings
    assert (warning.code, warning.message) == ("diverges", f"{message} (attempt 1)")
    service.end(job_id, 1, Cause.WORKER_LOST)
    assert service.claim(job_id, 1) is not None
    service.report(
        job_id, 2, [metrics(5, {"train/loss": nan, "x": 1})]
    )  # one by one: x is not a float
    again = (await events_of(service, job_id, "divergence"))[-1]
    assert (again.attempt, again.data) == (2, {"step": 5, "loss": "NaN"})


async def test_a_recipe_reports_a_divergence_itself(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {"train/loss": float("nan")})])
    assert await events_of(service, job_id, "divergence") == []


async def test_a_training_that_diverges_is_not_tried_again(service: Service) -> None:
    job_id = await service.running(max_retries=5)
    service.end(job_id, 1, Cause.DIVERGED, "training diverged")
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "diverged")


async def test_an_end_that_an_overloaded_machine_made_uses_up_no_budget(
    service: Service,
) -> None:
    most = 10  # the default for DRAY_INFRA_RETRIES
    job_id = await service.submit(max_retries=0)
    for attempt in range(1, most + 3):
        assert service.claim(job_id, attempt - 1) is not None
        service.report(job_id, attempt, [])
        service.end(job_id, attempt, Cause.WORKER_LOST, "not whole in time", slowness=31.0)
        job = await service.jobs.get(job_id)
        assert job.state is JobState.QUEUED
        assert job.reason.message.endswith("not counted)")
    charged = [
        e.data["charged_to"]
        for e in (await service.queries.events(job_id)).items
        if "charged_to" in e.data
    ]
    assert charged == ["free"] * (most + 2)


async def test_an_end_that_is_told_twice_ends_the_job_once(service: Service) -> None:
    job_id = await service.running()
    outcome = Outcome.of(Cause.SUCCEEDED, "done")
    reply = service.reply(job_id, 1, [log(0, "bye")], phase=Phase.ENDED, outcome=outcome)
    assert service.store(job_id, 1, reply) == attempt_results.Recorded(changed=True, live=False)
    before = await everything(service, job_id)
    assert service.store(job_id, 1, reply) == attempt_results.Recorded(changed=False, live=False)
    assert await everything(service, job_id) == before
    assert before["job"]["state"] == JobState.SUCCEEDED


async def test_an_attempt_that_was_given_up_can_not_speak_any_more(service: Service) -> None:
    job_id = await service.running()
    late = service.reply(job_id, 1, [log(0, "I am late")])
    service.end(job_id, 1, Cause.SUPERVISOR_LOST)
    assert service.claim(job_id, 1) is not None
    before = await everything(service, job_id)
    assert not service.store(job_id, 1, late).live
    assert not service.end(job_id, 1, Cause.SUCCEEDED).changed
    assert await everything(service, job_id) == before


async def test_a_reply_for_a_job_that_is_gone_changes_nothing(service: Service) -> None:
    assert not service.report("job-none", 1).live


async def test_the_first_metrics_make_the_job_run_with_the_workers_time(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    stepped_at = START + timedelta(seconds=2)
    service.advance(3)
    service.report(job_id, 1, [metrics(1, {"loss": 1.0}, at=stepped_at)], phase=Phase.STARTING)
    job = await service.jobs.get(job_id)
    assert job.state == JobState.RUNNING
    assert job.started_at == START
    assert job.first_step_at == stepped_at
    service.report(job_id, 1, [metrics(2, {"loss": 1.0}, at=service.now)])
    assert (await service.jobs.get(job_id)).first_step_at == stepped_at


async def test_a_script_without_metrics_runs_when_its_process_is_seen(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    service.report(job_id, 1, phase=Phase.STARTING)
    assert (await service.jobs.get(job_id)).state == JobState.STARTING
    service.advance(1)
    service.report(job_id, 1, phase=Phase.RUNNING)
    job = await service.jobs.get(job_id)
    assert (job.state, job.first_step_at) == (JobState.RUNNING, None)


async def test_guesses_are_metrics_and_no_progress(service: Service) -> None:
    job_id = await service.running()
    before = await service.jobs.get(job_id)
    service.report(job_id, 1, [metrics(7, {"guessed/loss": 0.5, "guessed/acc": float("nan")})])
    service.report(job_id, 1, [metrics(8, {"guessed/loss": 1})])
    job = await service.jobs.get(job_id)
    assert (job.progress, job.first_step_at) == (before.progress, before.first_step_at)
    assert job.summary == {"guessed/loss": 1.0, "guessed/acc": "NaN"}
    assert job.state == before.state


async def test_progress_and_summary_show_the_newest_of_rank_0(service: Service) -> None:
    job_id = await service.running()
    at = START
    for step in (1, 2, 3):
        at += timedelta(seconds=2)
        values = {"train/loss": 1.0 / step, "train/bad": float("nan")}
        ours = metrics(step, values, at=at, total_steps=13, epoch=1, samples_per_s=9.0)
        theirs = metrics(step, {"train/loss": 99.0}, rank=1, at=at)
        service.report(job_id, 1, [ours, theirs])
    job = await service.jobs.get(job_id)
    assert job.progress is not None
    assert (job.progress.step, job.progress.total_steps, job.progress.epoch) == (3, 13, 1)
    assert job.progress.samples_per_s == 9.0
    assert (job.progress.earliest_end_at, job.progress.latest_end_at) == (None, None)
    assert job.summary == {"train/loss": 1 / 3, "train/bad": "NaN"}


@pytest.mark.parametrize(
    ("cause", "state", "code"),
    [
        (Cause.SUCCEEDED, JobState.SUCCEEDED, "succeeded"),
        (Cause.USER_ERROR, JobState.QUEUED, "user_error"),
        (Cause.BAD_DATA, JobState.FAILED, "bad_data"),
        (Cause.DATA_UNREACHABLE, JobState.QUEUED, "data_unreachable"),
        (Cause.RUNTIME_EXCEEDED, JobState.FAILED, "runtime_exceeded"),
        (Cause.SLOTS_UNAVAILABLE, JobState.QUEUED, "slots_unavailable"),
        (Cause.WORKER_LOST, JobState.QUEUED, "worker_lost"),
        (Cause.INFRASTRUCTURE, JobState.QUEUED, "infrastructure"),
        (Cause.SUPERVISOR_LOST, JobState.QUEUED, "supervisor_lost"),
        (Cause.NODE_LOST, JobState.QUEUED, "node_lost"),
        (Cause.STOPPED, JobState.QUEUED, "preempted"),
    ],
)
@pytest.mark.parametrize("while_starting", [True, False])
@ON_SQLITE
async def test_every_cause_moves_the_job_by_its_rule(
    service: Service, cause: Cause, state: JobState, code: str, while_starting: bool
) -> None:
    job_id = await service.submit(max_retries=1)
    service.claim(job_id)
    if not while_starting:
        service.report(job_id, 1)
    service.end(job_id, 1, cause, "the sentence")
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (state, code)
    assert "the sentence" in job.reason.message


async def test_a_source_that_does_not_answer_costs_no_retry_of_the_users(service: Service) -> None:
    job_id = await service.running(max_retries=0)
    service.end(job_id, 1, Cause.DATA_UNREACHABLE, "s3://b/k: no answer; tried 4 times")
    job = await service.jobs.get(job_id)
    assert job.state == JobState.QUEUED
    assert job.reason.message == (
        "s3://b/k: no answer; tried 4 times (will be retried after at least 1 s, "
        "counted as a fault of the data source)"
    )


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.SUCCEEDED])
@ON_SQLITE
async def test_a_cancelled_job_ends_cancelled_unless_it_succeeded_first(
    service: Service, cause: Cause
) -> None:
    job_id = await service.running()
    await service.jobs.cancel(job_id)
    service.end(job_id, 1, cause, "the sentence")
    assert (await service.jobs.get(job_id)).state == JobState.CANCELLED
    (attempt,) = (await service.queries.attempts(job_id)).items
    assert attempt.reason is not None
    assert attempt.reason.code == cause

    winner = await service.running()
    await service.jobs.cancel(winner, actor="admin")
    being_stopped = (await service.jobs.get(winner)).reason
    assert being_stopped.message == "cancelled by admin; its processes are being stopped"
    service.end(winner, 1, Cause.SUCCEEDED)
    assert (await service.jobs.get(winner)).state == JobState.SUCCEEDED


async def test_budgets_are_spent_apart(service: Service) -> None:
    job_id = await service.submit(max_retries=1)
    causes = [Cause.NODE_LOST, Cause.WORKER_LOST, Cause.USER_ERROR, Cause.SLOTS_UNAVAILABLE]
    for attempt, cause in enumerate(causes):
        assert service.claim(job_id, attempt) is not None
        service.end(job_id, attempt + 1, cause)
        assert (await service.jobs.get(job_id)).state == JobState.QUEUED, cause
    assert service.claim(job_id, len(causes)) is not None
    service.end(job_id, len(causes) + 1, Cause.USER_ERROR)
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "user_error")
    assert "max_retries is 1" in job.reason.message


async def test_running_time_adds_up_over_attempts_until_it_is_spent(service: Service) -> None:
    job_id = await service.submit(max_runtime_s=100)
    first = service.claim(job_id)
    assert first is not None
    assert first.max_runtime_s == 100
    service.report(job_id, 1)
    service.advance(60)
    service.end(job_id, 1, Cause.NODE_LOST)
    second = service.claim(job_id, 1)
    assert second is not None
    assert second.max_runtime_s == pytest.approx(40)
    service.report(job_id, 2)
    service.advance(50)
    service.end(job_id, 2, Cause.NODE_LOST)
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "runtime_exceeded")


async def test_time_that_the_machine_slept_is_not_running_time(service: Service) -> None:
    job_id = await service.submit(max_runtime_s=100)
    service.claim(job_id)
    service.report(job_id, 1)
    service.advance(3600)
    service.end(job_id, 1, Cause.NODE_LOST, ran_s=30.0)
    second = service.claim(job_id, 1)
    assert second is not None
    assert second.max_runtime_s == pytest.approx(70)


async def test_without_a_supervisor_to_say_it_the_ledger_has_the_running_time(
    service: Service,
) -> None:
    job_id = await service.submit(max_runtime_s=100, resources={"num_workers": 2})
    service.claim(job_id, workers=2)
    service.report(job_id, 1)
    service.advance(3600)
    service.report(job_id, 1, [spent(at=service.now, useful=50.0, idle=10.0)])
    service.advance(5)
    service.end(job_id, 1, Cause.SUPERVISOR_LOST)
    second = service.claim(job_id, 1, workers=2)
    assert second is not None
    assert second.max_runtime_s == pytest.approx(100 - 30 - 5)


async def test_an_attempt_that_never_got_slots_uses_no_running_time(service: Service) -> None:
    job_id = await service.submit(max_runtime_s=100)
    service.claim(job_id)
    waiting = service.reply(job_id, 1, phase=Phase.ACQUIRING)
    service.store(job_id, 1, waiting)
    service.advance(500)
    dead = Outcome.unseen(Cause.SUPERVISOR_LOST, "its supervisor is gone")
    service.store(job_id, 1, replace(waiting, phase=Phase.ENDED, outcome=dead))
    again = service.claim(job_id, 1)
    assert again is not None
    assert again.max_runtime_s == 100


async def test_artifacts_and_checkpoints_outside_of_the_attempts_folder_are_refused(
    service: Service,
) -> None:
    job_id = await service.running()
    other = await service.running()
    outside = [
        "file:///etc/passwd",
        f"{service.storage.url}/../secret",
        service.url(other, 1, "artifacts/model"),
        service.url(job_id, 2, "artifacts/model"),
        service.url(job_id, 1, "../../../x"),
        f"{service.storage.url}x/jobs",
    ]
    service.report(
        job_id, 1, [service.artifact(job_id, 1, f"a{i}", u) for i, u in enumerate(outside)]
    )
    service.report(
        job_id,
        1,
        [
            frame(
                FrameKind.CHECKPOINT,
                {"step": 1, "url": outside[0], "size_bytes": 1, "manifest_sha256": SHA},
            )
        ],
    )
    assert (await service.queries.artifacts(job_id)).items == []
    assert (await service.queries.checkpoints(job_id)).items == []
    events = (await service.queries.events(job_id)).items
    assert [e.type for e in events].count("frames_refused") == 1


STRAGGLERS = {"step": 5, "ranks": [1], "slowdown": {"1": 2.0}, "lost_s": 1.0, "num_steps": 10}


@pytest.mark.parametrize(
    "bad",
    [
        frame(FrameKind.METRICS, {}),
        frame(FrameKind.METRICS, {"step": -1, "values": {"a": 1.0}}),
        frame(FrameKind.METRICS, {"step": 10**30, "values": {"a": 1.0}}),
        frame(FrameKind.METRICS, {"step": True, "values": {"a": 1.0}}),
        frame(FrameKind.METRICS, {"step": 1, "values": [1.0]}),
        frame(FrameKind.METRICS, {"step": 1, "values": {"a": "1"}}),
        frame(FrameKind.METRICS, {"step": 1, "values": {"a": 10**400}}),
        frame(FrameKind.METRICS, {"step": 1, "values": {"a\0b": 1.0}}),
        frame(FrameKind.METRICS, {"step": 1, "values": {"": 1.0}}),
        frame(FrameKind.METRICS, {"step": 1, "values": {"k" * 129: 1.0}}),
        frame(FrameKind.METRICS, {"step": 1, "values": {"a": 1.0}, "total_steps": "many"}),
        frame(FrameKind.LOG, {"line": 0}),
        frame(FrameKind.LOG, {"line": "0", "text": "x"}),
        frame(FrameKind.LOG, {"line": 0, "text": b"bytes"}),
        frame(FrameKind.LOG, {"line": 2**62, "text": "its gap would overflow a sum"}),
        frame(FrameKind.CHECKPOINT_DROPPED, {"url": None}),
        frame(FrameKind.RESUMED, {"step": 1.5}),
        frame(FrameKind.ERROR, {"type": "E", "message": "m", "traceback": ""}),
        frame(FrameKind.ERROR, {"cause": "bad", "type": "E", "message": "m", "traceback": ""}),
        frame(FrameKind.DIVERGENCE, {"step": 1, "loss": 1.0, "grad_norm": 1.0, "then": "hope"}),
        frame(FrameKind.ROUND_TROUBLE, {"number": -1, "left_out": [], "message": ""}),
        frame(FrameKind.ROUND_TROUBLE, {"number": 1, "left_out": ["x"], "message": ""}),
        frame(FrameKind.STRAGGLERS, {**STRAGGLERS, "lost_s": float("nan")}),
        frame(FrameKind.STRAGGLERS, {**STRAGGLERS, "slowdown": {"1": float("inf")}}),
    ],
    ids=lambda bad: ascii(f"{bad.kind}-{str(dict(bad.body))[:40]}"),
)
@ON_SQLITE
async def test_a_malformed_frame_is_refused_and_the_rest_is_stored(
    service: Service, bad: Any
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [bad, log(0, "after it")])
    service.report(job_id, 1, [bad])
    assert [x.text for x in (await service.queries.logs(job_id)).items] == ["after it"]
    events = (await service.queries.events(job_id)).items
    assert [e.type for e in events].count("frames_refused") == 1


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "a//b", "", "a\nb", "a\n", "a\x9bb", "a\u202eb", "a\ud800b", "a" * 1025],
    ids=lambda path: ascii(path[:10]),
)
@ON_SQLITE
async def test_an_artifact_whose_name_alone_is_wrong_is_refused(
    service: Service, path: str
) -> None:
    job_id = await service.running()
    inside = service.url(job_id, 1, "artifacts/x")
    refused, stored = (service.artifact(job_id, 1, name, inside) for name in (path, "x"))
    service.report(job_id, 1, [refused, stored])
    assert [one.path for one in (await service.queries.artifacts(job_id)).items] == ["x"]
    (event,) = await events_of(service, job_id, "frames_refused")
    assert sum(event.data["refused"].values()) == 1


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"], ids=ascii)
async def test_a_url_that_no_database_takes_is_refused(service: Service, name: str) -> None:
    job_id = await service.running()
    inside = service.url(job_id, 1, name)
    saved = service.checkpoint(job_id, 1, 5)
    checkpoint = replace(saved, body={**saved.body, "url": inside})
    dropped = frame(FrameKind.CHECKPOINT_DROPPED, {"step": 4, "url": inside})
    refused = [checkpoint, dropped, service.artifact(job_id, 1, "x", inside)]
    service.report(job_id, 1, [*refused, log(0, "after it")])
    assert (await service.queries.checkpoints(job_id)).items == []
    (event,) = await events_of(service, job_id, "frames_refused")
    assert sum(event.data["refused"].values()) == 3


async def test_a_line_of_a_time_that_is_none_has_the_time_of_its_storing(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [replace(log(0, "x"), time=at) for at in (1e300, -5.0)])
    lines = (await service.queries.logs(job_id)).items
    assert [line.time for line in lines] == [service.now] * 2


async def test_text_that_a_database_can_not_hold_is_stored_visibly(service: Service) -> None:
    job_id = await service.running()
    nasty = "a\0b \ud800 é 漢 \u2028 \x1b[0m"
    error = {"cause": "user_error", "type": "E\0", "message": nasty, "traceback": nasty}
    service.report(job_id, 1, [log(0, nasty), frame(FrameKind.ERROR, error)])
    service.end(job_id, 1, Cause.BAD_DATA, nasty)
    (line,) = (await service.queries.logs(job_id)).items
    assert line.text == "a␀b ? é 漢 \u2028 \x1b[0m"
    job = await service.jobs.get(job_id)
    assert "a␀b" in job.reason.message
    job.model_dump_json()


async def test_events_are_numbered_without_gaps(service: Service) -> None:
    job_id = await service.running(max_retries=3)
    error = frame(FrameKind.ERROR, {"cause": "user_error", "type": "E", "message": "m"})
    service.report(job_id, 1, [error] * 3)
    service.end(job_id, 1, Cause.USER_ERROR)
    service.claim(job_id, 1)
    service.report(job_id, 2, [metrics(1, {"a": 1.0}), metrics(1, {"a": 1.0})])
    await service.jobs.cancel(job_id)
    service.end(job_id, 2, Cause.STOPPED)
    events = (await service.queries.events(job_id)).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    moves = [(e.from_state, e.to_state) for e in events if e.to_state is not None]
    assert moves[0] == (None, JobState.QUEUED)
    assert all(before[1] == after[0] for before, after in pairwise(moves))
    assert events[-1].to_state == JobState.CANCELLED
    page = await service.queries.events(job_id, after_seq=2, limit=2)
    assert [event.seq for event in page.items] == [3, 4]
    assert page.next_seq == 4
    end = await service.queries.events(job_id, after_seq=events[-1].seq)
    assert (end.items, end.next_seq) == ([], events[-1].seq)


async def test_a_thousand_failing_ranks_leave_few_events(service: Service) -> None:
    job_id = await service.running()
    errors = [
        frame(FrameKind.ERROR, {"cause": "user_error", "message": str(rank)}, rank=rank)
        for rank in range(1000)
    ]
    service.report(job_id, 1, errors)
    events = (await service.queries.events(job_id)).items
    assert [e.type for e in events].count("error") == 8


async def test_later_attempts_resume_from_what_still_counts_newest_first(
    service: Service,
) -> None:
    job_id = await service.submit(max_retries=9)
    service.claim(job_id)
    kept = [service.checkpoint(job_id, 1, step) for step in (10, 20, 30)]
    service.report(job_id, 1, [resumed(0), *kept])
    service.end(job_id, 1, Cause.NODE_LOST)
    second = service.claim(job_id, 1)
    assert second is not None
    assert [ref.step for ref in second.resume_from] == [30, 20, 10]
    service.report(job_id, 2, [resumed(20), service.checkpoint(job_id, 2, 25)])
    service.end(job_id, 2, Cause.NODE_LOST)
    third = service.claim(job_id, 2)
    assert third is not None
    assert [ref.step for ref in third.resume_from] == [25, 20, 10]
    dropped = service.url(job_id, 1, "checkpoints/step-10")
    service.report(job_id, 3, [frame(FrameKind.CHECKPOINT_DROPPED, {"step": 10, "url": dropped})])
    page = await service.queries.checkpoints(job_id)
    assert [(c.attempt, c.step, c.is_latest) for c in page.items] == [(2, 25, True), (1, 20, False)]


@pytest.mark.parametrize(("metric", "best"), [("val/loss", 10), ("val/accuracy", 20)])
async def test_the_best_checkpoint_has_the_least_loss_or_the_most_of_another_metric(
    service: Service, metric: str, best: int
) -> None:
    job_id = await service.running(checkpoint={"best": metric})
    frames = [
        service.checkpoint(job_id, 1, 10, val_loss=0.5, val_accuracy=0.7),
        service.checkpoint(job_id, 1, 20, val_loss=0.6, val_accuracy=0.9),
        service.checkpoint(job_id, 1, 30, val_loss=float("nan"), val_accuracy=float("nan")),
    ]
    service.report(job_id, 1, frames)
    page = await service.queries.checkpoints(job_id)
    assert [c.step for c in page.items if c.is_best] == [best]
    assert page.items[0].metric == "NaN"


async def test_an_artifact_of_a_later_attempt_replaces_the_one_before(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [service.artifact(job_id, 1, "model")])
    (before,) = (await service.queries.artifacts(job_id)).items
    service.end(job_id, 1, Cause.NODE_LOST)
    service.claim(job_id, 1)
    service.report(job_id, 2, [service.artifact(job_id, 2, "model")])
    (after,) = (await service.queries.artifacts(job_id)).items
    assert after.id == before.id
    _, url = await service.queries.artifact(job_id, after.id)
    assert url == service.url(job_id, 2, "artifacts/model")


async def test_stragglers_are_named_with_the_time_they_cost(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    slow = {"step": 25, "ranks": [1], "slowdown": {"1": 2.04}, "lost_s": 3.21, "num_steps": 20}
    gone = {"step": 45, "ranks": [], "slowdown": {}, "lost_s": 0.0, "num_steps": 20}
    broken = {"step": 65, "ranks": [1], "slowdown": {}, "lost_s": 0.0, "num_steps": 20}
    bodies = (slow, gone, broken)
    service.report(job_id, 1, [frame(FrameKind.STRAGGLERS, body) for body in bodies])
    events = (await service.queries.events(job_id)).items
    told = [event for event in events if event.type == "stragglers"]
    assert [event.data for event in told] == [{**slow, "hostnames": {}}, {**gone, "hostnames": {}}]
    assert told[0].message == (
        "slower than the other ranks: rank 1 by a factor of 2.0; the other ranks waited 3.21 s in "
        "the last 20 steps"
    )
    assert told[1].message == "no rank is slower than the other ranks any longer"


ERROR = "ValueError: no column 'age' in {} (train.py, line 12)"


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        (ERROR.format("a.csv"), ERROR.format("a.csv"), False),
        (ERROR.format("a.csv"), ERROR.format("b.csv"), True),
        (ERROR.format("a.csv"), ERROR.format("a.csv").replace("12", "13"), True),
        (f"{ERROR} (rank 1 is ps 0)", f"{ERROR} (rank 3 is worker 1)", False),
        (
            "rank 0 exited with code 1",
            "rank 0 exited with code 1",
            True,
        ),  # the exception is unknown
    ],
)
async def test_an_error_that_comes_again_at_the_same_line_ends_the_job(
    service: Service, first: str, second: str, goes_on: bool
) -> None:
    job_id = await service.running(max_retries=5)
    service.end(job_id, 1, Cause.USER_ERROR, first)
    service.advance(3600)
    assert service.claim(job_id, 1) is not None
    service.end(job_id, 2, Cause.USER_ERROR, second)
    job = await service.jobs.get(job_id)
    assert job.state is (JobState.QUEUED if goes_on else JobState.FAILED)
    if not goes_on:
        assert job.reason.message == (
            f"{second} (the previous attempt failed with the same error at the same line)"
        )


@pytest.mark.parametrize("between", [None, Cause.WORKER_LOST])
async def test_a_script_whose_ranks_differ_in_two_attempts_in_a_row_ends_the_job(
    service: Service, between: Cause | None
) -> None:
    """The first time, the job resumes from its checkpoint, because a fault of a machine could have
    the same effect."""
    message = f"ScriptDiffersError: {ScriptDiffersError()}"
    job_id = await service.running(max_retries=5)
    ends = [message, *(["rank 1 was killed"] if between else []), message]
    for attempt, each in enumerate(ends, 1):
        service.end(job_id, attempt, Cause.WORKER_LOST, each)
        if attempt < len(ends):
            assert (await service.jobs.get(job_id)).state is JobState.QUEUED
            service.advance(3600)
            assert service.claim(job_id, attempt) is not None
    job = await service.jobs.get(job_id)
    if between:
        assert job.state is JobState.QUEUED
        return
    assert (job.state, job.reason.code) == (JobState.FAILED, "user_error")
    assert job.reason.message == f"{message} (the previous attempt ended in the same way)"


async def test_an_error_that_comes_again_after_a_lost_node_is_tried_again(service: Service) -> None:
    job_id = await service.running(max_retries=5)
    for attempt, cause in enumerate((Cause.USER_ERROR, Cause.NODE_LOST, Cause.USER_ERROR), 1):
        service.end(job_id, attempt, cause, ERROR)
        service.advance(3600)
        assert (await service.jobs.get(job_id)).state is JobState.QUEUED
        assert service.claim(job_id, attempt) is not None


@ON_SQLITE
@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (Cause.SUCCEEDED, "it ended. 1 file was left"),
        (Cause.USER_ERROR, "it ended (max_retries is 0). 1 file was left"),
        (Cause.STOPPED, "cancelled by the user. 1 file was left"),
    ],
)
async def test_each_end_of_a_job_names_the_results_that_are_not_kept(
    service: Service, cause: Cause, says: str
) -> None:
    job_id = await service.running(max_retries=0)
    if cause is Cause.STOPPED:
        await service.jobs.cancel(job_id)
    service.end(job_id, 1, cause, left_behind="1 file was left")
    job = await service.jobs.get(job_id)
    assert job.state.is_terminal
    assert job.reason.message == says
    assert (await service.queries.attempts(job_id)).items[0].reason.message == "it ended"


async def test_an_attempt_that_is_followed_by_another_names_no_results(service: Service) -> None:
    job_id = await service.running(max_retries=1)
    service.end(job_id, 1, Cause.USER_ERROR, left_behind="1 file was left")
    assert "1 file" not in (await service.jobs.get(job_id)).reason.message


async def test_a_job_that_another_user_cancelled_names_that_one(service: Service) -> None:
    for running in (True, False):
        job_id = await (service.running() if running else service.submit())
        await service.jobs.cancel(job_id, actor="admin")
        if running:
            service.end(job_id, 1, Cause.STOPPED)
        before = "" if running else " before the job started"
        assert (await service.jobs.get(job_id)).reason.message == f"cancelled by admin{before}"
