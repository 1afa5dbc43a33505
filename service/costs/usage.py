"""The slots of attempts in the usage over time."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from service.db.models import AttemptRow, JobRow
from service.db.repositories.scheduling import usage as repository
from service.domain.costs.slot_history import SlotHistory
from service.lifecycle import resizing
from service.lifecycle.usage import add_shares


def attempt_ended(session: Session, job: JobRow, attempt: AttemptRow) -> None:
    """Add the slots that the attempt held, and their cost, to the usage."""
    cost = repository.cost_of(session, job.id, attempt.attempt)
    whose = job.owner, attempt.queue or job.queue, "" if cost is None else cost.currency
    if attempt.started_at is not None and attempt.held_until is not None:
        history = SlotHistory(attempt.started_at, attempt.held_until, attempt.sizes)
        add_shares(session, *whose, history, slots_of(attempt))
    if cost is not None:
        history = SlotHistory(cost.since, cost.until, cost.sizes)
        add_shares(session, *whose, history, {"cost": cost.total})


def slots_of(attempt: Any) -> dict[str, float]:
    """Return the seconds of slots, CPUs and GPUs that an attempt has held so far, from a row of its
    columns."""
    bundle = resizing.held_request(attempt.slices, attempt.bundle, attempt.roles).mean_bundle
    slot_seconds = sum(each["slot_seconds"] for each in (attempt.held or {}).values())
    return {
        "slot_seconds": slot_seconds,
        "cpu_seconds": bundle.get("CPU", 0.0) * slot_seconds,
        "gpu_seconds": bundle.get("GPU", 0.0) * slot_seconds,
    }
