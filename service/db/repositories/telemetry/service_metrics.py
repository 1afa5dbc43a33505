"""SQL for the service's own metrics, and for metrics of queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow, ServiceMetricRow
from service.domain.meter import Cell
from service.domain.states import UNFINISHED


def add(session: Session, cells: Mapping[Cell, float]) -> None:
    """Add to the sums. The rows are always locked in the same order, so that processes can't
    deadlock."""
    is_postgres = session.get_bind().dialect.name == "postgresql"
    insert: Any = postgresql.insert if is_postgres else sqlite.insert
    statement = insert(ServiceMetricRow)
    statement = statement.on_conflict_do_update(
        index_elements=["metric", "label", "part"],
        set_={"value": ServiceMetricRow.value + statement.excluded.value},
    )
    rows = [
        {"metric": metric, "label": label, "part": part, "value": value}
        for (metric, label, part), value in sorted(cells.items())
    ]
    session.connection().execute(statement, rows)


def every(session: Session) -> dict[Cell, float]:
    """Return the sums over all processes."""
    rows = session.scalars(select(ServiceMetricRow))
    return {(row.metric, row.label, row.part): row.value for row in rows}


def queues(session: Session) -> Sequence[Row[str, JobState, int, datetime]]:
    """Return (queue, state, num_jobs, first_at) of unfinished jobs. `first_at` is the time from
    which the oldest job that is waiting only for free slots could start."""
    can_start = JobRow.kept_back_since.is_(None) & JobRow.held_by.is_(None)
    first = func.min(func.coalesce(JobRow.begin_at, JobRow.created_at)).filter(can_start)
    query = (
        select(JobRow.queue, JobRow.state, func.count().label("num_jobs"), first.label("first_at"))
        .where(JobRow.finished_at.is_(None), JobRow.state.in_(UNFINISHED))
        .group_by(JobRow.queue, JobRow.state)
    )
    return session.execute(query).all()
