"""Records how an attempt, its job, and all jobs together used their slots."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.contracts import Cause
from service.db.models import AttemptRow, JobRow
from service.db.repositories import faults as repository
from service.domain.attempts import ledger

UNREPORTED = frozenset({Cause.SUPERVISOR_LOST, Cause.NODE_LOST})
"""If an attempt ended for one of these causes, no supervisor can report how its last seconds were
used."""


def book(
    session: Session, job: JobRow, attempt: AttemptRow, reported: ledger.Ledger, at: datetime
) -> None:
    """Replace the attempt's ledger with the ledger that its supervisor reported at `at`."""
    before = attempt.slot_seconds or {}
    attempt.slot_seconds = dict(reported)
    attempt.ledger_at = at
    job.slot_seconds = ledger.replaced(job.slot_seconds or {}, before, reported)
    repository.count_slot_seconds(session, ledger.growth(before, reported))


def close(
    session: Session, job: JobRow, attempt: AttemptRow, cause: Cause, ended_at: datetime
) -> None:
    """Record the slots that an attempt held after its supervisor's last report."""
    since = attempt.ledger_at or attempt.started_at
    if cause not in UNREPORTED or since is None or ended_at <= since:
        return
    held_s = job.world_size * (ended_at - since).total_seconds()
    book(session, job, attempt, ledger.unaccounted(attempt.slot_seconds or {}, held_s), ended_at)


def view(slot_seconds: Mapping[str, float] | None) -> views.Goodput | None:
    """Return the ledger, rounded to milliseconds. The total is the sum of the rounded
    categories."""
    if slot_seconds is None:
        return None
    shown = {name: round(seconds, 3) for name, seconds in ledger.checked(slot_seconds).items()}
    share = ledger.useful_share(shown)
    return views.Goodput(
        slot_seconds=views.SlotSeconds(**shown),
        total=round(ledger.total(shown), 3),
        useful_share=None if share is None else round(share, 4),
    )
