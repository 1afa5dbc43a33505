"""The end of a sweep that has failed too often."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from dray.spec import Sweep
from service.db.models import JobRow
from service.db.repositories.submission import sweeps as repository
from service.domain.states import TOO_MANY_FAILED
from service.lifecycle import dependencies


def trial_failed(session: Session, job: JobRow, now: datetime) -> None:
    """Cancel the trials that have not started, if more have failed than the sweep allows. Those
    that have started go on."""
    row = None if job.array_id is None else repository.lock(session, job.array_id)
    if row is None:
        return
    sweep = Sweep.model_validate(row.sweep)
    failed = repository.num_failed(session, row.array_id)
    if sweep.max_failed is None or failed <= sweep.max_failed:
        return
    trials = "1 trial" if failed == 1 else f"{failed} trials"
    message = f"never started: {trials} of its sweep failed, and max_failed is {sweep.max_failed}"
    data = {"failed": failed}
    dependencies.end_unstarted(session, row.array_id, TOO_MANY_FAILED, message, now, data)
