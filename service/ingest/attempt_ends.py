"""The accounting of an attempt's end: its charge, lost log lines and description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.contracts import (
    Cause,
    Outcome,
)
from service.db.models import AttemptRow, JobRow
from service.db.repositories.telemetry import chunks as chunks_repository
from service.domain.attempts import ledger
from service.domain.attempts.retries import (
    Retry,
    RetryBudget,
)


def confirmed(outcome: Outcome, *, lacks_reports: bool) -> Outcome:
    """Return the outcome, or a failure if the outcome is a success but reports were omitted."""
    if outcome.cause is not Cause.SUCCEEDED or not lacks_reports:
        return outcome
    message = "the attempt ended normally, but some of its reports could not be stored"
    return replace(outcome, cause=Cause.INFRASTRUCTURE, message=message)


def log_lines_lost(
    session: Session, attempt: AttemptRow, outcome: Outcome
) -> Mapping[int, int | None]:
    """Return how many log lines of each rank were lost; None for an unknown number."""
    if outcome.log_lines_lost is not None:
        return outcome.log_lines_lost
    if attempt.started_at is None and not attempt.cursor:
        return {}  # no process of the attempt is known
    logged = chunks_repository.log_ranks(session, attempt.job_id, attempt.attempt)
    return dict.fromkeys(sorted({*logged, *range(attempt.world_size)}))


def ran_s(attempt: AttemptRow, outcome: Outcome, ended_at: datetime) -> float:
    """Return the running time that counts against `max_runtime_s`, excluding the time during which
    the machine was suspended.

    If no supervisor reported the running time, it is derived from the ledger, or from the wall time
    if the group changed its size.
    """
    if outcome.ran_s is not None:
        return outcome.ran_s
    if attempt.started_at is None:
        return 0.0
    wall_s = max(0.0, (ended_at - attempt.started_at).total_seconds())
    if not attempt.slot_seconds or attempt.carriers is not None:
        return wall_s
    return min(wall_s, ledger.total(attempt.slot_seconds) / attempt.world_size)


def charge(job: JobRow, cause: Cause, budget: RetryBudget) -> None:
    if budget is RetryBudget.USER:
        job.user_failures += 1
    elif budget is RetryBudget.INFRA:
        job.infra_failures += 1
    else:
        job.free_requeues += 1
    if cause is Cause.PREEMPTED:
        job.preemptions += 1


def retry_sentence(cause: Cause, retry: Retry) -> str:
    whose = "the data source" if cause is Cause.DATA_UNREACHABLE else "the cluster"
    charged = {
        RetryBudget.USER: "counted against max_retries",
        RetryBudget.INFRA: f"counted as a fault of {whose}",
        RetryBudget.FREE: "not counted",
    }[retry.budget]
    return f"will be retried after at least {retry.delay_s:g} s, {charged}"


def details(job: JobRow, outcome: Outcome) -> dict[str, Any]:
    """Return the data of the event that reports an attempt's end."""
    data: dict[str, Any] = {"cause": str(outcome.cause)}
    if job.log_lines_dropped:
        data["log_lines_dropped"] = job.log_lines_dropped
    if outcome.rank is not None:
        data["rank"] = outcome.rank
    if outcome.exit_code is not None:
        data["exit_code"] = outcome.exit_code
    return data
