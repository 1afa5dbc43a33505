"""The mean time between losses of a worker, which a launch passes on to its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from ray_workers.shared.contracts import WORKER_MTBF_S, Cause
from service.db.repositories import attempts as repository
from service.domain.attempts.reliability import Seen, worker_mtbf_s

LOSSES = (Cause.WORKER_LOST, Cause.NODE_LOST, Cause.SUPERVISOR_LOST, Cause.INFRASTRUCTURE)
"""Not preemptions, before which a job saves, nor the user's own errors, which say nothing of the
machines."""
OVERLOAD = "the machine is overloaded"
"""Words of `machine_pace` in the reason of an attempt that ended because its machines were too
slow: nothing of it was lost."""
LOOK_BACK = timedelta(days=30)


def asks(document: Mapping[str, Any]) -> bool:
    """Whether the job saves by how often workers are lost."""
    return bool(document["checkpoint"]["every_steps"] == "auto")


def worker_mtbf(session: Session, job_id: str, now: datetime) -> float:
    """Seconds between two losses of one worker, by the attempts of the last weeks."""
    ended = repository.ended(session, since=now - LOOK_BACK)
    return worker_mtbf_s(
        _seen(ended), _seen(row for row in ended if row.job_id == job_id), prior_s=WORKER_MTBF_S
    )


def _seen(rows: Iterable[Row[Any, Any, Any, Any, Any, Any]]) -> Seen:
    worker_s, num_losses = 0.0, 0
    for row in rows:
        worker_s += row.world_size * max(0.0, (row.finished_at - row.started_at).total_seconds())
        num_losses += row.reason_code in LOSSES and OVERLOAD not in (row.reason_message or "")
    return Seen(worker_s, num_losses)
