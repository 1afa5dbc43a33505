"""A process that does not respond is shown to users as unresponsive until it responds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Cause, PollReply, ProcessKind, SilentProcess
from tests.unit.service.helpers import START, Service, events_of, metrics, two_ranks

AGENT = SilentProcess(ProcessKind.NODE_AGENT, "node-a", START.timestamp())
SUPERVISOR = SilentProcess(ProcessKind.SUPERVISOR, None, START.timestamp())


def nothing_but(service: Service, job_id: str, *silent: SilentProcess) -> PollReply:
    """Return a reply without new reports of the attempt, from a process that still responds."""
    reply = service.reply(job_id, 1)
    cursor = dict(service.cursor(job_id, 1))
    return replace(reply, cursor=cursor, phase=None, phase_times={}, silent=silent)


async def test_silence_is_an_event_once_and_its_end_another(service: Service) -> None:
    job_id = await two_ranks(service)
    for silent in ((AGENT,), (replace(AGENT, since=AGENT.since + 9),), ()):
        service.store(job_id, 1, nothing_but(service, job_id, *silent))
    fell, back = await events_of(service, job_id, "silence")
    assert (fell.code, fell.data) == (
        "not_answering",
        {"process": "node_agent", "node_id": "node-a"},
    )
    assert fell.message == "the node agent of node-a does not respond"
    assert back.code == "answers_again"
    assert (await service.jobs.get(job_id)).state is JobState.RUNNING


async def test_explain_says_who_is_silent_since_when_and_progress_promises_no_end(
    service: Service,
) -> None:
    job_id = await two_ranks(service)
    for step in range(11, 20):
        service.advance(2)
        values = {"train/loss": 1.0}
        service.report(job_id, 1, [metrics(step, values, at=service.now, total_steps=100)])
    assert (await service.jobs.get(job_id)).progress.latest_end_at is not None
    service.store(job_id, 1, nothing_but(service, job_id, SUPERVISOR))
    message = (await service.queries.explain(job_id)).reason.message
    assert "the attempt's supervisor has not responded since 2026-01-01 12:00:00 UTC" in message
    job = await service.jobs.get(job_id)
    assert job.progress.latest_end_at is None
    assert job.progress.step == 19
    service.end(job_id, 1, Cause.SUPERVISOR_LOST)
    assert "answered" not in (await service.queries.explain(job_id)).reason.message


@pytest.mark.parametrize("kind", ProcessKind)
async def test_every_kind_of_process_has_a_name_for_users(
    service: Service, kind: ProcessKind
) -> None:
    job_id = await two_ranks(service)
    service.store(job_id, 1, nothing_but(service, job_id, replace(AGENT, kind=kind)))
    (fell,) = await events_of(service, job_id, "silence")
    assert fell.data["process"] == kind
    assert str(kind).replace("_", " ") in fell.message


async def test_a_phase_that_nobody_can_tell_leaves_it_as_it_was(service: Service) -> None:
    job_id = await two_ranks(service)
    service.store(job_id, 1, nothing_but(service, job_id, SUPERVISOR))
    (attempt,) = (await service.queries.attempts(job_id)).items
    assert attempt.state == "running"
