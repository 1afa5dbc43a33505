"""Receipts of resumes: what an attempt restored, and the loss on both sides of the gap.

Rank 0 reports all but the loss after the resume, which comes with the metrics of the first step.
The event that shows the receipt waits for that step, or for the attempt's end.
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
    """The receipt as it is stored; None of an attempt that began from nothing."""
    if not report.url and not report.passed_over:
        return None
    return asdict(report) | {"loss_after": None}


def awaited_step(attempt: AttemptRow) -> int | None:
    """The step whose loss the attempt's receipt still lacks."""
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
    """Show the receipt of an attempt that ends as it is, if no step followed the resume."""
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
        # It was saved, and its node was lost before the service had read what came before.
        message += f"; the metrics of steps {reported + 1} to {receipt['step']} are lost"
    remark(session, job, type_="resumed", code="resumed", message=message, now=now, data=receipt)


def _sentence(receipt: Mapping[str, Any], *, is_anothers: bool) -> str:
    parts = []
    if not receipt["url"]:
        parts.append("began afresh")
    elif receipt["step"] == 0:
        parts.append("began with another job's weights")
    else:
        whose = "another job's" if is_anothers else "the"
        parts.append(f"resumed from {whose} checkpoint of step {receipt['step']}")
    if receipt["passed_over"]:
        steps = ", ".join(str(each["step"]) for each in receipt["passed_over"])
        parts.append(f"passed over what is damaged (step {steps})")
    before, after = receipt["loss_before"], receipt["loss_after"]
    if before is not None and isinstance(after, float):
        parts.append(f"training loss {before:.4g} before and {after:.4g} after")
    return "; ".join(parts)
