"""Receipts of resumes: what an attempt restored, and the loss on both sides of the gap.

The ranks tell all but the loss after the resume, which comes with the first step's figures. The
event that shows the receipt waits for it, or for the attempt's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy.orm import Session

from service.db.models import AttemptRow, JobRow
from service.domain.text import clean
from service.lifecycle.transitions import remark
from service.telemetry.metric_writer import by_name

LOSS = "train/loss"
MAX_STEP = 2**53
MAX_PASSED_OVER = 100

Count = Annotated[int, Field(ge=0, le=MAX_STEP)]
Text = Annotated[
    str,
    Field(max_length=2048),
    BeforeValidator(lambda value: clean(value) if isinstance(value, str) else value),
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Told(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _PassedOver(_Told):
    step: Count
    why: Text


class _Position(_Told):
    epoch: Count
    step_in_epoch: Count
    samples: Count


class _Receipt(_Told):
    """As ranks tell it; they run a user's code, so each field is looked at."""

    step: Count
    url: Text
    sha256: Sha256 | None = None
    size_bytes: Count | None = None
    position: _Position | None = None
    world_size: Count | None = None
    optimizer_restored: bool = False
    rng: Text | None = None
    loss_before: float | None = None
    passed_over: Annotated[list[_PassedOver], Field(max_length=MAX_PASSED_OVER)] = []


def of_frame(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The receipt in a RESUMED frame; None of an attempt that began from nothing. ValueError if
    it is malformed."""
    receipt = _Receipt.model_validate(dict(body))
    if not receipt.url and not receipt.passed_over:
        return None
    return receipt.model_dump(mode="json") | {"loss_after": None}


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
    """The first step after the resume has ended, with this loss."""
    assert attempt.receipt is not None
    attempt.receipt = attempt.receipt | {"loss_after": by_name(loss_after)}
    _show(session, job, attempt.receipt, now)


def close(session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
    """The attempt ends: show its receipt as it is, if nothing came after the resume."""
    if attempt.receipt is not None and awaited_step(attempt) is not None:
        _show(session, job, attempt.receipt, now)


def _show(session: Session, job: JobRow, receipt: dict[str, Any], now: datetime) -> None:
    origin = job.init_from or {}
    message = _sentence(receipt, is_anothers=receipt["url"] == origin.get("url"))
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
