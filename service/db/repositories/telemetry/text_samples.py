"""The SQL of texts that jobs generate at their evaluations."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from service.db.models import TextSamplesRow

MAX_STEPS = 1000
"""Maximum number of evaluations of a job whose texts are kept, namely the newest."""


def put(session: Session, row: TextSamplesRow) -> None:
    """Add the texts of a step, or replace them, and remove the oldest if there are too many."""
    session.merge(row)
    session.flush()
    own = TextSamplesRow.job_id == row.job_id
    steps = select(TextSamplesRow.step).where(own).order_by(TextSamplesRow.step.desc())
    oldest = session.scalar(steps.offset(MAX_STEPS).limit(1))
    if oldest is not None:
        session.execute(delete(TextSamplesRow).where(own, TextSamplesRow.step <= oldest))


def of_job(
    session: Session, job_id: str, *, step: int | None, after_step: int, limit: int
) -> list[TextSamplesRow]:
    """Return the texts after a step, or only the texts of `step`, sorted by step."""
    query = select(TextSamplesRow).where(
        TextSamplesRow.job_id == job_id, TextSamplesRow.step > after_step
    )
    if step is not None:
        query = query.where(TextSamplesRow.step == step)
    return list(session.scalars(query.order_by(TextSamplesRow.step).limit(limit)))
