"""The progress of a job, from the reports of its rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from ray_workers.shared.frames import (
    MetricsReport,
)
from service.db.models import AttemptRow, JobRow
from service.domain.progress import Mark, end_between, reached


def progress_in(report: MetricsReport) -> dict[str, Any]:
    """Return the parts of the progress that a report contains. A report of an evaluation, for
    example, contains only some parts; the other parts remain unchanged."""
    found: dict[str, Any] = {
        name: value
        for name in ("total_steps", "epoch")
        if (value := getattr(report, name)) is not None
    }
    if report.samples_per_s is not None:
        speed = report.samples_per_s
        found["samples_per_s"] = speed if math.isfinite(speed) else None
    return found


def progress(
    job: JobRow, attempt: AttemptRow, reported: Mapping[str, Any], step: int, at: datetime
) -> dict[str, Any]:
    """Return the progress of rank 0, with the earliest and latest end of the job at this attempt's
    speeds."""
    total = reported.get("total_steps")
    marks = [Mark(*mark) for mark in (job.progress or {}).get("marks") or ()]
    marks = reached(marks, Mark(at.timestamp(), step))
    ends = None if total is None else end_between(marks, total, _ended_at(job, attempt))
    earliest, latest = (None, None) if ends is None else (time.isoformat() for time in ends)
    return {
        "step": step,
        "total_steps": total,
        "epoch": reported.get("epoch"),
        "samples_per_s": reported.get("samples_per_s"),
        "earliest_end_at": earliest,
        "latest_end_at": latest,
        "marks": marks,
    }


def _ended_at(job: JobRow, attempt: AttemptRow) -> datetime | None:
    """Return the time at which `max_runtime_s` ends the attempt."""
    if job.max_runtime_s is None or attempt.started_at is None:
        return None
    return attempt.started_at + timedelta(seconds=job.max_runtime_s - job.runtime_used_s)
