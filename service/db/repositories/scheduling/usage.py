"""SQL for the usage of the cluster over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    Subquery,
    Table,
    case,
    delete,
    func,
    literal,
    select,
)
from sqlalchemy.orm import Session

from service.db.models import (
    AttemptCostRow,
    AttemptRow,
    CapacityRow,
    JobRow,
    UsageRow,
    WaitRow,
)
from service.db.repositories.bulk import CHUNK, in_chunks, insert_of, table_of
from service.domain.costs.usage import AMOUNTS, OF_HOUR, QUARTER_S, UsageBuckets, UsageKey

CAPACITY = ("measured_s", "cpu_seconds", "gpu_seconds")


def add(session: Session, counted: Mapping[UsageKey, Mapping[str, float]]) -> None:
    """Add to the amounts of these quarters, users and queues, and to the amounts of their hours."""
    sums: dict[tuple[int, UsageKey], Counter[str]] = defaultdict(Counter)
    for key, amounts in counted.items():
        hour = replace(key, quarter=key.quarter - key.quarter % OF_HOUR)
        sums[1, key].update(amounts)
        sums[OF_HOUR, hour].update(amounts)
    rows = [
        {"length": length, **asdict(key), **{name: amounts[name] for name in AMOUNTS}}
        for (length, key), amounts in sums.items()
    ]
    _add(session, table_of(UsageRow), rows)


def add_capacity(session: Session, rows: Mapping[int, Mapping[str, float]]) -> None:
    """Add to the measured time and the resources of these quarters."""
    found = [{"quarter": quarter, **amounts} for quarter, amounts in rows.items()]
    _add(session, table_of(CapacityRow), found)


def add_waits(session: Session, waits: Mapping[tuple[int, str, str], float]) -> None:
    """Add to the time for which jobs waited, keyed by (quarter, queue, code)."""
    found = [
        {"quarter": quarter, "queue": queue, "code": code, "job_seconds": seconds}
        for (quarter, queue, code), seconds in waits.items()
    ]
    _add(session, table_of(WaitRow), found)


def _add(session: Session, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add the amounts to the rows with the same keys. Rows are always locked in the same order, so
    that transactions can't deadlock."""
    keys = [column.name for column in table.primary_key.columns]
    amounts = [column.name for column in table.c if column.name not in keys]
    statement = insert_of(session)(table)
    statement = statement.on_conflict_do_update(
        index_elements=keys,
        set_={name: table.c[name] + statement.excluded[name] for name in amounts},
    )
    ordered = sorted(rows, key=lambda row: [row[key] for key in keys])
    for some in in_chunks(ordered, CHUNK):
        session.connection().execute(statement, some)


def forget(session: Session, before_quarter: int) -> None:
    """Delete the rows of earlier quarters."""
    of_each = UsageRow.length.in_((1, OF_HOUR))  # so that the key is used as an index
    session.execute(delete(UsageRow).where(of_each, UsageRow.quarter < before_quarter))
    for table in map(table_of, (CapacityRow, WaitRow)):
        session.execute(delete(table).where(table.c.quarter < before_quarter))


def cost_of(session: Session, job_id: str, attempt: int) -> AttemptCostRow | None:
    return session.get(AttemptCostRow, (job_id, attempt))


def holder(session: Session, job_id: str) -> Row[Any] | None:
    """Return the `owner`, `queue`, `bundle` and `cost` of a job."""
    c = JobRow.__table__.c
    query: Select[Any] = select(c.owner, c.queue, c.bundle, c.cost).where(c.id == job_id)
    return session.execute(query).one_or_none()


def totals(
    session: Session, buckets: UsageBuckets, by: str | None, owner: str | None
) -> Sequence[Row[Any]]:
    """Return the amounts of ended attempts as (bucket, name, currency, *AMOUNTS).

    by: `owner` or `queue`, or None for the total, whose name is empty. owner: if set, the name of
    all other users is empty.
    """
    inner = _in_buckets(table_of(UsageRow), buckets, UsageRow.length == buckets.length)
    key: ColumnElement[Any] = literal("") if by is None else inner.c[by]
    if by == "owner" and owner is not None:
        key = case((inner.c.owner == owner, inner.c.owner), else_="")
    named = select(
        inner.c.bucket, key.label("name"), inner.c.currency, *(inner.c[name] for name in AMOUNTS)
    ).subquery()
    sums = (func.sum(named.c[name]).label(name) for name in AMOUNTS)
    keys = (named.c.bucket, named.c.name, named.c.currency)
    return session.execute(select(*keys, *sums).group_by(*keys)).all()


def capacity(session: Session, buckets: UsageBuckets) -> Sequence[Row[Any]]:
    """Return (bucket, *CAPACITY)."""
    inner = _in_buckets(table_of(CapacityRow), buckets)
    sums = (func.sum(inner.c[name]).label(name) for name in CAPACITY)
    return session.execute(select(inner.c.bucket, *sums).group_by(inner.c.bucket)).all()


def waits(session: Session, buckets: UsageBuckets) -> Sequence[Row[Any]]:
    """Return (bucket, code, job_seconds)."""
    inner = _in_buckets(table_of(WaitRow), buckets)
    keys = (inner.c.bucket, inner.c.code)
    hours = func.sum(inner.c.job_seconds).label("job_seconds")
    query: Select[Any] = select(*keys, hours).group_by(*keys)
    return session.execute(query).all()


def _in_buckets(table: Table, buckets: UsageBuckets, *conditions: ColumnElement[bool]) -> Subquery:
    """Return the rows in the buckets, with the index of each row's bucket."""
    quarter = table.c.quarter
    index = case(
        *(
            (quarter >= run.quarter, (quarter - run.quarter) // run.length + run.index)
            for run in reversed(buckets.runs())
        )
    )
    first, last = buckets.bounds[0] // QUARTER_S, buckets.bounds[-1] // QUARTER_S
    return (
        select(index.label("bucket"), *table.c)
        .where(*conditions, quarter >= first, quarter < last)
        .subquery()
    )


_LIVE = ("slices", "bundle", "roles", "held", "held_until", "sizes", "started_at")


def live(session: Session) -> Sequence[Row[Any]]:
    """Return the columns `_LIVE`, `job_id`, `name`, `owner`, `queue`, `currency`, `total`,
    `cost_since`, `cost_until` and `cost_sizes` of the attempts that have slots."""
    attempts, jobs = AttemptRow.__table__.c, JobRow.__table__.c
    costs = AttemptCostRow.__table__.c
    query: Select[Any] = (
        select(
            *(attempts[name] for name in _LIVE),
            *(attempts.job_id, jobs.name, jobs.owner),
            func.coalesce(attempts.queue, jobs.queue).label("queue"),
            *(costs.currency, costs.total),
            *(costs[name].label(f"cost_{name}") for name in ("since", "until", "sizes")),
        )
        .join_from(AttemptRow.__table__, JobRow.__table__, jobs.id == attempts.job_id)
        .outerjoin(
            AttemptCostRow.__table__,
            (costs.job_id == attempts.job_id) & (costs.attempt == attempts.attempt),
        )
        .where(attempts.finished_at.is_(None), attempts.started_at.is_not(None))
    )
    return session.connection().execute(query).all()
