"""What a supervisor reports of a group that changed its size: checked, and stored."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.spec import MAX_WORKERS
from ray_workers.shared.contracts import Frame
from service.db.models import AttemptRow, JobRow
from service.db.notifications import QUEUE
from service.db.session import notify
from service.domain import policy
from service.domain import resizing as rules
from service.domain.slots import count as count_of
from service.domain.slots import workers
from service.ingest.frame_checks import MAX_STEP, Refused, count, text
from service.lifecycle import resizing
from service.lifecycle.transitions import remark

MAX_NODE_ID_CHARS = 128
MAX_MESSAGE_CHARS = 4096


def store_resized(
    session: Session, job: JobRow, attempt: AttemptRow, frame: Frame, now: datetime
) -> None:
    """A supervisor says what its group holds from now on. Refused if that is not its own."""
    body = frame.body
    world_size, before = count(body, "world_size", MAX_WORKERS), attempt.world_size
    lacking = count(body, "lacking", MAX_WORKERS)
    kept = _slices_of(body)
    if world_size > count_of(kept) or (world_size == 0 and not lacking):
        raise Refused(f"{world_size} workers on {count_of(kept)} slots are no group")
    try:
        after = rules.resized(_books(attempt), kept, count(body, "grants", MAX_STEP), lacking)
    except rules.NotItsOwn as wrong:
        raise Refused(str(wrong)) from wrong
    attempt.carriers = list(resizing.carriers(attempt))
    attempt.slices = resizing.as_rows(after.books.slices)
    attempt.granted = None if after.books.granted is None else resizing.as_rows(after.books.granted)
    attempt.grow_after = None if after.pause is None else now + after.pause
    attempt.lacking, attempt.growth = lacking, None
    attempt.world_size = job.world_size = world_size
    message = text(body, "message", MAX_MESSAGE_CHARS) or f"goes on with {workers(world_size)}"
    remark(
        session,
        job,
        type_="resized",
        code="resized",
        message=message,
        now=now,
        data={
            "world_size": world_size,
            "before": before,
            "slices": resizing.as_rows(kept),
            "lacking": lacking,
        },
    )
    notify(session, QUEUE)


def _books(attempt: AttemptRow) -> rules.Books:
    on_the_way = None if attempt.granted is None else resizing.as_slices(attempt.granted)
    return rules.Books(resizing.as_slices(attempt.slices), attempt.grants, on_the_way)


def _slices_of(body: Mapping[str, Any]) -> tuple[policy.Slice, ...]:
    rows = body["slices"]
    if not isinstance(rows, list | tuple) or len(rows) > MAX_WORKERS:
        raise Refused("slices is not a list")
    numbers = ((row, count(row, "num_workers", MAX_WORKERS)) for row in rows)
    return tuple(
        policy.Slice(text(row, "node_id", MAX_NODE_ID_CHARS), number)
        for row, number in numbers
        if number
    )
