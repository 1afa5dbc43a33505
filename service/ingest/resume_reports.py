"""Stores a receipt for each resume, which names the checkpoint that the attempt restored and states
the loss before and after.

Rank 0 reports everything except the loss after the resume, which is in the metrics of the first
step. Therefore, the event with the receipt is added after the first step, or when the attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.frames import ResumedReport
from service.db.models import AttemptRow, JobRow
from service.db.repositories import attempts as attempts_repository
from service.lifecycle.transitions import remark
from service.telemetry.chunk_columns import by_name

LOSS = "train/loss"


def of_report(report: ResumedReport) -> dict[str, Any] | None:
    """Return the receipt to store; None for an attempt that restored nothing."""
    if not report.url and not report.passed_over:
        return None
    return asdict(report) | {"loss_after": None}


def awaited_step(attempt: AttemptRow) -> int | None:
    """Return the step whose loss is still missing from the attempt's receipt, or None."""
    receipt = attempt.receipt
    if receipt is None or receipt["loss_after"] is not None:
        return None
    step: int = receipt["step"]
    return step + 1


def complete(
    session: Session, job: JobRow, attempt: AttemptRow, loss_after: float, now: datetime
) -> None:
    """Complete the receipt with the loss of the first step after the resume."""
    assert attempt.receipt is not None
    attempt.receipt = attempt.receipt | {"loss_after": by_name(loss_after)}
    _show(session, job, attempt, now)


def close(session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
    """Add the event with an incomplete receipt if the attempt ends before the awaited step."""
    if attempt.receipt is not None and awaited_step(attempt) is not None:
        _show(session, job, attempt, now)


def _show(session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
    origin, receipt = job.init_from or {}, attempt.receipt
    assert receipt is not None
    is_anothers = receipt["url"] == origin.get("url")
    message = _sentence(receipt, is_anothers=is_anothers)
    reported = attempts_repository.furthest_step(session, job.id, before_attempt=attempt.attempt)
    is_recipe = job.spec.get("script") is None
    if reported < receipt["step"] and is_recipe and not is_anothers:
        # The rank's node was lost after the checkpoint was saved but before the service had read
        # all metrics.
        message += f"; the metrics of steps {reported + 1} to {receipt['step']} are lost"
    remark(session, job, type_="resumed", code="resumed", message=message, now=now, data=receipt)


def _sentence(receipt: Mapping[str, Any], *, is_anothers: bool) -> str:
    parts = []
    if not receipt["url"]:
        parts.append("started from scratch")
    elif receipt["step"] == 0:
        parts.append("began with another job's weights")
    else:
        whose = "another job's" if is_anothers else "the"
        parts.append(f"resumed from {whose} checkpoint of step {receipt['step']}")
    if receipt["passed_over"]:
        steps = ", ".join(str(each["step"]) for each in receipt["passed_over"])
        parts.append(f"skipped damaged checkpoints (step {steps})")
    before, after = receipt["loss_before"], receipt["loss_after"]
    if before is not None and isinstance(after, float):
        parts.append(f"training loss {before:.4g} before the resume and {after:.4g} after it")
    return "; ".join(parts)
