"""Charging an attempt for the slots that it holds: at each report of their use, and at its end.

All that it has held is priced as the prices are then. So a change of prices counts for attempts
that live, and not for those that have ended.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from service.db.models import AttemptCostRow, AttemptRow, JobRow
from service.db.repositories.scheduling import costs as repository
from service.domain.costs.prices import Prices, cost_of
from service.lifecycle import held_slots, resizing


def charge(
    session: Session, job: JobRow, attempt: AttemptRow, prices: Prices | None, until: datetime
) -> None:
    """Store the cost of the attempt up to this time. prices: None where nothing is priced."""
    held_slots.settle(attempt, until)
    if prices is None or attempt.held_until is None or attempt.started_at is None:
        return
    bundle = resizing.held_request(attempt.slices, attempt.bundle, attempt.roles).mean_bundle
    cost = cost_of(prices, bundle, held_slots.of(attempt), attempt.slot_seconds or {})
    repository.put(
        session,
        AttemptCostRow(
            job_id=job.id,
            attempt=attempt.attempt,
            queue=job.queue,
            owner=job.owner,
            since=attempt.started_at,
            until=attempt.held_until,
            currency=prices.currency,
            slot_seconds=cost.slot_seconds,
            total=cost.total,
            useful=cost.useful,
            unreported=cost.unreported,
        ),
    )
    job.cost = repository.of_job(session, job.id, prices.currency)
