"""SQL for the costs of attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, func, select, true
from sqlalchemy.orm import Session

from service.db.models import AttemptCostRow, JobCostRow, JobRow
from service.domain.costs.slot_history import SlotHistory

AMOUNTS = ("slot_seconds", "total", "useful", "unreported")
_SUMS = tuple(func.sum(getattr(AttemptCostRow, name)) for name in AMOUNTS)


def put(session: Session, row: AttemptCostRow) -> None:
    """Add the cost of an attempt, or replace its earlier cost."""
    session.merge(row)
    session.flush()


def set_of_job(session: Session, job: JobRow, currency: str) -> None:
    """Store the total cost of the job's attempts that were priced in this currency."""
    job.cost = of_job(session, job.id, currency)
    session.merge(JobCostRow(job_id=job.id, total=job.cost["total"]))


def of_job(session: Session, job_id: str, currency: str) -> dict[str, Any]:
    """Return the value for `JobRow.cost`: the total cost of the job's attempts that were priced in
    this currency."""
    here = AttemptCostRow.job_id == job_id, AttemptCostRow.currency == currency
    sums = session.execute(select(*_SUMS).where(*here)).one()
    _, total, useful, unreported = (float(amount or 0.0) for amount in sums)
    return {
        "currency": currency,
        "total": total,
        "useful": useful,
        "wasted": max(0.0, total - useful - unreported),
        "unreported": unreported,
    }


def of_attempts(session: Session, job_id: str) -> dict[int, AttemptCostRow]:
    """Return the costs of the job's priced attempts, by attempt number."""
    query = select(AttemptCostRow).where(AttemptCostRow.job_id == job_id)
    return {row.attempt: row for row in session.scalars(query)}


@dataclass
class CostSum:
    """The total cost of several attempts, in one currency."""

    amounts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AMOUNTS, 0.0))
    num_jobs: int = 0

    def add(self, row: Row[Any] | AttemptCostRow, share: float = 1.0) -> None:
        for name in AMOUNTS:
            self.amounts[name] += share * float(getattr(row, name))


def between(
    session: Session,
    by: str,
    since: datetime,
    until: datetime,
    *,
    owner: str | None = None,
    queues: Collection[str] | None = None,
    currency: str | None = None,
) -> dict[tuple[str, str], CostSum]:
    """Return the spending between two times, keyed by (owner or queue, currency).

    If only a fraction of an attempt's slot-seconds is in this period, the same fraction of its cost
    is counted.

    `by` is `owner` or `queue`. If `owner`, `queues` or `currency` is given, other costs are not
    counted.
    """
    c = AttemptCostRow
    key = getattr(c, by)
    narrowed: list[ColumnElement[bool]] = [
        c.until > since,
        c.since < until,
        true() if owner is None else c.owner == owner,
        true() if queues is None else c.queue.in_(queues),
        true() if currency is None else c.currency == currency,
    ]
    is_within = (c.since >= since) & (c.until <= until)
    found: dict[tuple[str, str], CostSum] = {}
    named = [sum_.label(name) for sum_, name in zip(_SUMS, AMOUNTS, strict=True)]
    whole = select(key.label("key"), c.currency, *named).where(*narrowed, is_within)
    for row in session.execute(whole.group_by(key, c.currency)):
        found.setdefault((row.key, row.currency), CostSum()).add(row)
    for part in session.scalars(select(c).where(*narrowed, ~is_within)):
        sum_ = found.setdefault((getattr(part, by), part.currency), CostSum())
        sum_.add(part, SlotHistory(part.since, part.until, part.sizes).share(since, until))
    counts = select(key.label("key"), c.currency, func.count(c.job_id.distinct()).label("n"))
    for row in session.execute(counts.where(*narrowed).group_by(key, c.currency)):
        # Use `setdefault`, because keys may have been added since the earlier statements ran.
        found.setdefault((row.key, row.currency), CostSum()).num_jobs = row.n
    return found


def spent_in_all(session: Session, queues: Sequence[str], currency: str) -> dict[str, float]:
    """Return the total cost of each queue's jobs in this currency. Queues without costs are
    omitted."""
    c = AttemptCostRow
    here = c.queue.in_(queues), c.currency == currency
    query = select(c.queue, func.sum(c.total)).where(*here).group_by(c.queue)
    return {queue: float(total) for queue, total in session.execute(query)}
