"""A rank hangs on a real Ray: it is detected and reported, and the job continues."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from dray import Client
from dray.views import DrillState, Hang, JobState
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.supervision.rules.timings import Timings
from tests.integration.harness import (
    Service,
    assert_books_add_up,
    assert_promises,
    digits,
    eventually,
    step_of,
    training_pids,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.marks import SOAK

pytestmark = pytest.mark.ray

AT_STEP = 25
STEP_S = Timings().hang_s[RankPhase.COMPUTE]
SAVED_STEP = 20
"""A checkpoint that exists by then."""
WAITS_FOR_OTHERS = {"exchange", "evaluate"}


def strike(job_id: str, rank: int, number: int) -> None:
    os.kill(training_pids(job_id)[rank], number)


def assert_tells_where_everyone_was(hang: Hang, *, culprit: int, num_ranks: int) -> None:
    """Return the hangs as `GET /v1/jobs/{id}/hangs` shows them."""
    assert hang.culprits == [culprit]
    assert [rank.rank for rank in hang.ranks] == list(range(num_ranks))
    assert hang.waited_s is not None
    assert hang.limit_s is not None
    assert hang.waited_s > hang.limit_s >= STEP_S
    stopped = hang.ranks[culprit]
    assert (hang.step, hang.phase) == (stopped.step, stopped.phase)
    assert stopped.step is not None
    assert stopped.step >= AT_STEP
    assert stopped.since_s is not None
    assert stopped.since_s > hang.limit_s
    for rank in hang.ranks:
        assert rank.stack is not None
        assert rank.stack.startswith("Stack (most recent call first):")
        assert "ray_workers/training/loop/trainer.py" in rank.stack
        assert isinstance(rank.collective, int)
        assert isinstance(stopped.collective, int)
        assert rank.collective >= stopped.collective > 0


def test_a_stopped_rank_is_replaced_and_what_everyone_was_at_is_kept(
    embedded: Service, client: Client
) -> None:
    job = client.submit(digits(train={"epochs": 20}, max_retries=0))
    wait_for_step(client, job.id, AT_STEP)
    strike(job.id, 1, signal.SIGSTOP)
    job = client.wait(job.id, timeout_s=240)
    assert job.state is JobState.SUCCEEDED, job.reason
    moves = {event.code: event.data for event in client.events(job.id) if event.type == "state"}
    assert (moves["group_lost"]["ranks"], moves["group_lost"]["how"]) == ([1], "hang")
    assert moves["recovered"]["steps_lost"] == 0
    assert len(client.attempts(job.id)) == 1
    assert_promises(embedded, client, job.id)
    (hang,) = client.hangs(job.id)
    assert_tells_where_everyone_was(hang, culprit=1, num_ranks=2)
    assert hang.ranks[0].phase in WAITS_FOR_OTHERS
    assert_books_add_up(client, job.id)


@SOAK
def test_ranks_that_hold_a_model_together_resume_when_one_is_stopped_and_when_one_is_killed(
    embedded: Service, client: Client
) -> None:
    """No other process has the parts of the lost server."""
    spec: dict[str, Any] = digits(train={"epochs": 20}, parallel={"shard": 2}, max_retries=0)
    job = client.submit(spec)
    wait_for_step(client, job.id, AT_STEP)
    wait_for_checkpoint(client, job.id, SAVED_STEP)
    strike(job.id, 1, signal.SIGSTOP)
    trains_again(client, job.id, attempt=2)
    strike(job.id, 0, signal.SIGKILL)
    job = client.wait(job.id, timeout_s=240)
    assert job.state is JobState.SUCCEEDED, job.reason
    stopped, killed, last = client.attempts(job.id)
    assert stopped.reason is not None
    assert stopped.reason.code == "worker_lost"
    assert "rank 1 made no progress for" in stopped.reason.message
    assert killed.reason is not None
    assert killed.reason.code == "worker_lost"
    assert "rank 0 was killed by signal 9" in killed.reason.message
    assert SAVED_STEP <= killed.resume_step <= last.resume_step
    for resumed in (killed, last):
        assert resumed.receipt is not None
        assert resumed.receipt.step == resumed.resume_step
    assert_promises(embedded, client, job.id)
    (hang,) = client.hangs(job.id)
    assert hang.attempt == 1
    assert_tells_where_everyone_was(hang, culprit=1, num_ranks=2)
    assert_books_add_up(client, job.id)


@SOAK
def test_a_drill_that_stalls_a_single_rank_says_what_the_way_back_costs(
    embedded: Service, client: Client
) -> None:
    spec = digits(train={"epochs": 40}, resources={"num_workers": 1}, max_retries=0)
    job = client.submit(spec)
    wait_for_step(client, job.id, AT_STEP)
    wait_for_checkpoint(client, job.id, SAVED_STEP)
    drill = client.drill(job.id, kind="stall", wait=True)
    assert drill.state is DrillState.PASSED, drill.message
    assert drill.recovery_s is not None
    assert drill.recovery_s > STEP_S
    assert drill.steps_lost is not None
    first, second = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.code == "worker_lost"
    assert second.resume_step >= SAVED_STEP
    client.cancel(job.id)
    assert client.wait(job.id, timeout_s=60).state is JobState.CANCELLED
    (hang,) = client.hangs(job.id)
    assert_tells_where_everyone_was(hang, culprit=0, num_ranks=1)
    assert_promises(embedded, client, job.id)


def trains_again(client: Client, job_id: str, *, attempt: int) -> None:
    """Wait until this attempt has completed a step beyond what was completed before."""

    def does() -> bool:
        job = client.get(job_id)
        assert not job.state.is_terminal, job.reason
        return job.attempt == attempt and job.state is JobState.RUNNING

    eventually(does, why=f"attempt {attempt} never trained")
    wait_for_step(client, job_id, step_of(client, job_id) + 20)
