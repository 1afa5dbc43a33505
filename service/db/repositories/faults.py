"""SQL for hangs, drills and slot-seconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, Update, bindparam, delete, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from dray.views import DrillState
from service.db.models import DrillRow, HangRow, SlotSecondsRow
from service.db.repositories.bulk import CHUNK, in_chunks

_OPEN = (DrillState.WAITING.value, DrillState.STRUCK.value)


def hangs(session: Session, job_id: str) -> list[HangRow]:
    """Return the job's hangs, oldest first."""
    return list(
        session.scalars(select(HangRow).where(HangRow.job_id == job_id).order_by(HangRow.seq))
    )


def has_hung(session: Session, job_id: str, attempt: int) -> bool:
    """Whether a hang of this attempt has been stored."""
    found = select(HangRow.seq).where(HangRow.job_id == job_id, HangRow.attempt == attempt)
    return session.scalar(found.limit(1)) is not None


def add_hang(
    session: Session,
    job_id: str,
    *,
    attempt: int,
    time: datetime,
    body: Mapping[str, Any],
    keep: int,
) -> int:
    """Add a hang, delete all but the job's latest `keep` hangs, and return the number of the
    hang."""
    newest = session.scalar(select(func.max(HangRow.seq)).where(HangRow.job_id == job_id))
    seq = (newest or 0) + 1
    session.add(HangRow(job_id=job_id, seq=seq, attempt=attempt, time=time, body=dict(body)))
    session.execute(
        delete(HangRow)
        .where(HangRow.job_id == job_id, HangRow.seq <= seq - keep)
        .execution_options(synchronize_session=False)
    )
    return seq


def add_drill(session: Session, row: DrillRow) -> None:
    session.add(row)
    session.flush()


def drill(session: Session, job_id: str, drill_id: str) -> DrillRow | None:
    return session.get(DrillRow, (job_id, drill_id))


def drills(session: Session, job_id: str) -> list[DrillRow]:
    """Return the job's drills in the order in which they were requested."""
    query = select(DrillRow).where(DrillRow.job_id == job_id)
    return list(session.scalars(query.order_by(DrillRow.created_at, DrillRow.id)))


def open_drills(session: Session, job_id: str) -> list[DrillRow]:
    """Return the job's unfinished drills in the order in which they were requested."""
    query = select(DrillRow).where(DrillRow.job_id == job_id, DrillRow.state.in_(_OPEN))
    return list(session.scalars(query.order_by(DrillRow.created_at, DrillRow.id)))


def with_open_drills(session: Session, job_ids: Collection[str]) -> set[str]:
    """Return the ids of the given jobs that have unfinished drills."""
    return {
        job_id
        for some in in_chunks(sorted(job_ids), CHUNK)
        for job_id in session.connection().scalars(_with_open_drills(), {"job_ids": some})
    }


@cache
def _with_open_drills() -> Select[str]:
    c = DrillRow.__table__.c
    query = select(c.job_id).where(c.state.in_(_OPEN)).distinct()
    return query.where(c.job_id.in_(bindparam("job_ids", expanding=True)))


def waiting_drills(session: Session) -> Sequence[Row[Any]]:
    """Return (job_id, attempt, id, kind, rank, at_step) of all drills whose fault has not been
    injected yet."""
    return session.connection().execute(_waiting_drills()).all()


@cache
def _waiting_drills() -> Select[Any]:
    c = DrillRow.__table__.c
    query = select(c.job_id, c.attempt, c.id, c.kind, c.rank, c.at_step)
    # This condition must match the condition of the partial index.
    waiting = text("drills.state = 'waiting'")
    return query.where(waiting).order_by(c.job_id, c.id)


def fail_drills(session: Session, job_ids: Sequence[str], message: str, now: datetime) -> None:
    """Mark the unfinished drills of these jobs as failed."""
    for some in in_chunks(job_ids, CHUNK):
        asked = {"job_ids": some, "new_message": message, "new_finished_at": now}
        session.execute(_fail_drills(), asked)


@cache
def _fail_drills() -> Update:
    return (
        update(DrillRow)
        .where(DrillRow.job_id.in_(bindparam("job_ids", expanding=True)), DrillRow.state.in_(_OPEN))
        .values(
            state=DrillState.FAILED.value,
            message=bindparam("new_message"),
            finished_at=bindparam("new_finished_at"),
        )
        .execution_options(synchronize_session=False)
    )


def count_slot_seconds(session: Session, grown: Mapping[str, float]) -> None:
    """Add slot-seconds to the totals over all jobs.

    Rows are always locked in the same order, so that transactions can't deadlock.
    """
    if not grown:
        return
    on_postgres = session.get_bind().dialect.name == "postgresql"
    insert_ = postgresql.insert(SlotSecondsRow) if on_postgres else sqlite.insert(SlotSecondsRow)
    values = [{"slot_class": name, "seconds": grown[name]} for name in sorted(grown)]
    session.connection().execute(
        insert_.values(values).on_conflict_do_update(
            index_elements=["slot_class"],
            set_={"seconds": SlotSecondsRow.seconds + insert_.excluded.seconds},
        )
    )


def slot_seconds(session: Session) -> dict[str, float]:
    """Return the total slot-seconds of all jobs, keyed by category. Categories without slot-seconds
    are omitted."""
    return {row.slot_class: row.seconds for row in session.scalars(select(SlotSecondsRow))}
