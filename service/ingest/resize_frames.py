"""Stores a supervisor's report of a group that has changed its size."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from ray_workers.shared.supervisor_frames import ResizedReport
from service.db.models import AttemptRow, JobRow
from service.db.notifications import ATTEMPTS, QUEUE
from service.db.session import notify
from service.domain.scheduling.elastic import resizing as rules
from service.domain.scheduling.placement.phrases import workers
from service.domain.scheduling.placement.slots import count as count_of
from service.ingest.decoding import BadFrame
from service.lifecycle import held_slots, resizing
from service.lifecycle.transitions import remark


def store_resized(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    report: ResizedReport,
    at: datetime,
    now: datetime,
) -> None:
    """Store the slots that a group has held since `at`. Raises BadFrame if the group does not own
    these slots."""
    world_size, lacking, before = report.world_size, report.lacking, attempt.world_size
    kept = tuple(report.slices)
    if world_size > count_of(kept) or (world_size == 0 and not lacking):
        raise BadFrame(f"{world_size} workers can't form a group on {count_of(kept)} slots")
    try:
        after = rules.resized(_holding(attempt), kept, report.grants, lacking)
    except rules.NotItsOwn as wrong:
        raise BadFrame(str(wrong)) from wrong
    attempt.carriers = list(resizing.carriers(attempt))
    held_slots.settle(attempt, at)
    held, num_before = after.holding, count_of(resizing.as_slices(attempt.slices))
    attempt.slices = resizing.as_rows(held.slices)
    attempt.granted = None if held.granted is None else resizing.as_rows(held.granted)
    pause = after.pause
    if attempt.recalled is not None and report.grants >= attempt.grants:
        attempt.recalled, attempt.recalled_at, pause = None, None, rules.GROWING_PAUSE
        if count_of(held.slices) == num_before:
            attempt.recall_after = now + rules.KEEPING_PAUSE
    attempt.grow_after = None if pause is None else now + pause
    message = report.message or f"continues with {workers(world_size)}"
    attempt.lacking, attempt.growth = lacking, None
    if not lacking and resizing.trains_with_fewer(job, world_size):
        attempt.growth = {"code": "resized", "message": message, "blocked_by": []}
    attempt.world_size = job.world_size = world_size
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
    notify(session, QUEUE, ATTEMPTS)


def _holding(attempt: AttemptRow) -> rules.Holding:
    on_the_way = None if attempt.granted is None else resizing.as_slices(attempt.granted)
    return rules.Holding(resizing.as_slices(attempt.slices), attempt.grants, on_the_way)
