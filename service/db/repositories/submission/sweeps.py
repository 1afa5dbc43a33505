"""SQL for sweeps and their trials."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow, SweepRow, TrialRow, TrialRungRow
from service.db.repositories.bulk import CHUNK, in_chunks, table_of
from service.domain.states import STOPPED_EARLY


def insert_sweep(session: Session, row: SweepRow, trials: Sequence[Mapping[str, Any]]) -> None:
    session.add(row)
    session.flush()
    session.execute(insert(table_of(TrialRow)), list(trials))


def get(session: Session, array_id: str) -> SweepRow | None:
    return session.get(SweepRow, array_id)


def lock(session: Session, array_id: str) -> SweepRow | None:
    """Lock the sweep and return it. No other transaction can judge a trial of the sweep until this
    transaction ends."""
    query = select(SweepRow).where(SweepRow.array_id == array_id).with_for_update()
    return session.scalar(query)


def trial(session: Session, job_id: str) -> TrialRow | None:
    return session.get(TrialRow, job_id)


def add_rung(session: Session, array_id: str, rung: int, job_id: str, value: float | None) -> None:
    session.add(TrialRungRow(array_id=array_id, rung=rung, job_id=job_id, value=value))
    session.flush()


def rank_on_rung(
    session: Session, array_id: str, rung: int, value: float | None, *, maximises: bool
) -> tuple[int, int]:
    """Return the number of trials that were judged at the rung, and the number of these trials that
    are better than `value`."""
    better = func.count().filter(_is_better(value, maximises))
    # Don't count trials that failed after they were judged, because such a failure must not cause
    # other trials to be stopped.
    failed = select(JobRow.id).where(JobRow.array_id == array_id, JobRow.state == JobState.FAILED)
    query = select(func.count(), better).where(
        TrialRungRow.array_id == array_id,
        TrialRungRow.rung == rung,
        TrialRungRow.job_id.not_in(failed),
    )
    num_judged, num_better = session.execute(query).one()
    return num_judged, num_better


def _is_better(value: float | None, maximises: bool) -> ColumnElement[bool]:
    if value is None:
        return TrialRungRow.value.is_not(None)
    return TrialRungRow.value > value if maximises else TrialRungRow.value < value


def num_failed(session: Session, array_id: str) -> int:
    query = select(func.count()).select_from(JobRow)
    query = query.where(JobRow.array_id == array_id, JobRow.state == JobState.FAILED)
    return session.scalar(query) or 0


def num_stopped(session: Session, array_id: str) -> int:
    query = select(func.count()).select_from(JobRow)
    query = query.where(
        JobRow.array_id == array_id,
        JobRow.state == JobState.CANCELLED,
        JobRow.reason_code == STOPPED_EARLY,
        JobRow.deleted_at.is_(None),
    )
    return session.scalar(query) or 0


TrialOfJob = Row[Any]
"""A row with the columns of `_trials`."""


def _trials(array_id: str) -> Select[Any]:
    t, j = TrialRow.__table__.c, JobRow.__table__.c
    return (
        select(
            *(t.job_id, t.array_index, t.parameters, t.value, t.value_step, t.last_step, t.rung),
            *(j.state, j.reason_code, j.reason_message, j.started_at, j.finished_at, j.colour),
        )
        .join_from(TrialRow, JobRow, t.job_id == j.id)
        .where(t.array_id == array_id, j.deleted_at.is_(None))
    )


def best(session: Session, array_id: str, *, maximises: bool) -> TrialOfJob | None:
    """Return the trial with the best value, excluding trials that failed or were stopped early."""
    t, j = TrialRow.__table__.c, JobRow.__table__.c
    query = _trials(array_id).where(
        t.value.is_not(None), j.state != JobState.FAILED, j.reason_code != STOPPED_EARLY
    )
    by_value = t.value.desc() if maximises else t.value
    return session.execute(query.order_by(by_value, t.array_index).limit(1)).one_or_none()


def page(session: Session, array_id: str, after_index: int, limit: int) -> Sequence[TrialOfJob]:
    """Return up to `limit` trials with indices above `after_index`, in ascending order."""
    index = TrialRow.__table__.c.array_index
    query = _trials(array_id).where(index > after_index).order_by(index).limit(limit)
    return session.execute(query).all()


EarlierTrialRow = Row[Any, Any, Any, Any, Any, Any]


def earlier_trials(session: Session, array_id: str) -> Sequence[EarlierTrialRow]:
    """Return (index, parameters, value, last_step, state, reason_code) of all trials that have
    parameters."""
    t, j = TrialRow.__table__.c, JobRow.__table__.c
    query = (
        select(
            *(t.array_index, t.parameters, t.value, t.last_step),
            *(j.state, j.reason_code),
        )
        .join_from(TrialRow, JobRow, t.job_id == j.id)
        .where(t.array_id == array_id, t.parameters.is_not(None))
        .order_by(t.array_index)
    )
    return session.execute(query).all()


def parameters(session: Session, job_ids: Collection[str]) -> dict[str, dict[str, Any] | None]:
    """Return the parameters of the trials among these jobs, keyed by job id; None for a trial
    without parameters."""
    return {
        row.job_id: row.parameters
        for some in in_chunks(sorted(job_ids), CHUNK)
        for row in session.connection().execute(_parameters(), {"job_ids": some})
    }


@cache
def _parameters() -> Select[Any]:
    c = TrialRow.__table__.c
    query = select(c.job_id, c.parameters)
    return query.where(c.job_id.in_(bindparam("job_ids", expanding=True)))


def searched(session: Session, array_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the parameters of these sweeps with their possible values, keyed by the id of the
    sweep. Ids of other arrays are omitted."""
    c = SweepRow.__table__.c
    query = select(c.array_id, c.sweep).where(c.array_id.in_(array_ids))
    return {row.array_id: row.sweep["parameters"] for row in session.execute(query)}


def without_values(session: Session, job_ids: Collection[str]) -> dict[str, str]:
    """Return the trials among `job_ids` that lack parameters, each with the id of its sweep."""
    return _without_values(session, "job_id", job_ids)


def without_values_of(session: Session, array_ids: Collection[str]) -> dict[str, str]:
    """Return the trials of these sweeps that have no parameters yet, each with the id of its
    sweep."""
    return _without_values(session, "array_id", array_ids)


def _without_values(session: Session, column: str, ids: Collection[str]) -> dict[str, str]:
    return {
        row.job_id: row.array_id
        for some in in_chunks(sorted(ids), CHUNK)
        for row in session.connection().execute(_lacking(column), {"ids": some})
    }


@cache
def _lacking(column: str) -> Select[Any]:
    """Return a query for trials that have no parameters, and whose `column` is in `ids`."""
    c = TrialRow.__table__.c
    query = select(c.job_id, c.array_id).where(c.parameters.is_(None))
    return query.where(c[column].in_(bindparam("ids", expanding=True)))


def set_values(
    session: Session, job_id: str, parameters: Mapping[str, Any], document: Mapping[str, Any]
) -> bool:
    """Set the parameters of a trial. Returns False if the trial already has parameters or is no
    longer waiting."""
    waits = select(JobRow.id).where(JobRow.id == job_id, JobRow.state == JobState.QUEUED)
    if session.scalar(waits.with_for_update()) is None:
        return False
    took = session.execute(
        update(TrialRow)
        .where(TrialRow.job_id == job_id, TrialRow.parameters.is_(None))
        .values(parameters=dict(parameters))
        .returning(TrialRow.job_id)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if took is None:
        return False
    session.execute(
        update(JobRow)
        .where(JobRow.id == job_id)
        .values(spec=dict(document))
        .execution_options(synchronize_session=False)
    )
    return True


def drop_empty(session: Session, array_ids: Collection[str]) -> None:
    """Delete the given sweeps that have no trials left."""
    for some in in_chunks(sorted(array_ids), CHUNK):
        has_trial = exists().where(TrialRow.array_id == SweepRow.array_id)
        session.execute(delete(SweepRow).where(SweepRow.array_id.in_(some), ~has_trial))
