"""Counts what jobs use in each quarter of an hour, for reports of the usage over time.

The amounts of a transaction are stored at its end, with one statement and in the order of their
keys, so that transactions can't deadlock. An attempt is counted once, when it ends; until then,
reports read its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.repositories.scheduling import usage as repository
from service.db.session import at_end
from service.domain.costs.slot_history import SlotHistory
from service.domain.costs.usage import (
    QUARTER_S,
    UsageKey,
    measured,
    quarter_bounds,
    quarter_of,
)
from service.domain.system_metrics import SystemSamples

_COUNTED = "usage"


def jobs_started(session: Session, rows: Iterable[Any], now: datetime) -> None:
    """Count jobs whose first attempt begins. Each row has an `owner` and a `queue`."""
    for row in rows:
        _count(session, UsageKey(quarter_of(now), row.owner, row.queue), {"num_started": 1})


def jobs_ended(session: Session, rows: Iterable[Any], state: JobState, now: datetime) -> None:
    """Count jobs that have ended in this state. Each row has an `owner` and a `queue`."""
    name = f"num_{state.value.lower()}"
    for row in rows:
        _count(session, UsageKey(quarter_of(now), row.owner, row.queue), {name: 1})


def add_shares(
    session: Session,
    owner: str,
    queue: str,
    currency: str,
    history: SlotHistory,
    amounts: Mapping[str, float],
) -> None:
    """Divide the amounts of an ended attempt among the quarters in which it held slots."""
    bounds = quarter_bounds(history.since, history.until)
    for index, share in history.shares(bounds).items():
        key = UsageKey(bounds[index] // QUARTER_S, owner, queue, currency)
        _count(session, key, {name: share * amount for name, amount in amounts.items()})


def samples_joined(session: Session, job_id: str, samples: SystemSamples) -> None:
    """Add the time for which samples show whether the job's GPUs were used."""
    columns = [uses for (key, _), uses in samples.columns.items() if is_gpu_use(key)]
    job = repository.holder(session, job_id) if columns else None
    if job is None:
        return
    currency = (job.cost or {}).get("currency", "")
    part = min(1.0, job.bundle.get("GPU", 1.0))
    for uses in columns:
        for quarter, seconds, is_idle in measured(samples.times, uses):
            idle = {"gpu_idle_s": part * seconds} if is_idle else {}
            amounts = {"gpu_measured_s": part * seconds, **idle}
            _count(session, UsageKey(quarter, job.owner, job.queue, currency), amounts)


def is_gpu_use(key: str) -> bool:
    """Whether this is the key of a GPU's utilization, such as `system/gpu/0/utilization`."""
    return key.startswith("system/gpu/") and key.endswith("/utilization")


def _count(session: Session, key: UsageKey, amounts: Mapping[str, float]) -> None:
    counted = session.info.setdefault(_COUNTED, {})
    counted.setdefault(key, Counter()).update(amounts)
    at_end(session, _store)


def _store(session: Session) -> None:
    repository.add(session, session.info.pop(_COUNTED))
