"""SQL for tags, notes and experiments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import ExperimentRow, JobAnnotationRow, JobLabelRow, JobRow, JobTagRow
from service.db.repositories.bulk import CHUNK, in_chunks
from service.domain.tracking.search_tree import EXPERIMENT


def annotation(session: Session, job_id: str) -> JobAnnotationRow | None:
    return session.get(JobAnnotationRow, job_id)


def notes_of(session: Session, job_ids: Collection[str]) -> dict[str, str]:
    """Return the notes of these jobs, keyed by job id. Jobs whose tags and notes were never changed
    are omitted."""
    row = JobAnnotationRow
    found: dict[str, str] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        query = select(row.job_id, row.notes).where(row.job_id.in_(some))
        found.update((job_id, notes) for job_id, notes in session.execute(query))
    return found


def annotate(session: Session, job_id: str, notes: str, now: datetime, by: str) -> None:
    """Store the notes as the next revision. The caller must have locked the job's row."""
    row = annotation(session, job_id)
    if row is None:
        row = JobAnnotationRow(job_id=job_id, revision=0)
        session.add(row)
    row.notes, row.updated_at, row.updated_by = notes, now, by
    row.revision += 1
    session.flush()


def set_tags(session: Session, job_id: str, tags: Collection[str]) -> None:
    session.execute(delete(JobTagRow).where(JobTagRow.job_id == job_id))
    session.add_all(JobTagRow(job_id=job_id, tag=tag) for tag in sorted(tags))
    session.flush()


def experiments(session: Session, after: str, limit: int) -> Sequence[Row[str, int, str]]:
    """Return (name, number of jobs, id of the newest job) of experiments with names after `after`,
    sorted by name."""
    label = JobLabelRow
    query = (
        select(label.value, func.count(), func.max(label.job_id))
        .where(label.key == EXPERIMENT, label.value > after, *_shown(label.job_id))
        .group_by(label.value)
        .order_by(label.value)
        .limit(limit)
    )
    return session.execute(query).all()


def jobs_of(session: Session, name: str, limit: int) -> list[str]:
    """Return the ids of the experiment's newest jobs, newest first."""
    job_id = JobLabelRow.job_id
    query = select(job_id).where(*_in_experiment(name)).order_by(job_id.desc()).limit(limit)
    return list(session.scalars(query))


def states_of(session: Session, name: str) -> dict[JobState, int]:
    """Return the number of the experiment's jobs in each state; states without jobs are omitted."""
    query = (
        select(JobRow.state, func.count())
        .join(JobLabelRow, JobLabelRow.job_id == JobRow.id)
        .where(*_in_experiment(name))
        .group_by(JobRow.state)
    )
    return {JobState(state): number for state, number in session.execute(query)}


def _in_experiment(name: str) -> tuple[Any, ...]:
    label = JobLabelRow
    return (label.key == EXPERIMENT, label.value == name, *_shown(label.job_id))


def _shown(job_id: Any) -> tuple[Any, ...]:
    return (job_id.not_in(select(JobRow.id).where(JobRow.deleted_at.is_not(None))),)


def baselines(session: Session, names: Collection[str]) -> Mapping[str, str]:
    """Return the pinned baselines of these experiments, keyed by the name of the experiment.
    Experiments without a baseline are omitted."""
    found: dict[str, str] = {}
    for some in in_chunks(sorted(names), CHUNK):
        query = (
            select(ExperimentRow.name, ExperimentRow.baseline)
            .join(JobRow, JobRow.id == ExperimentRow.baseline)
            .where(ExperimentRow.name.in_(some), JobRow.deleted_at.is_(None))
        )
        found.update((name, job_id or "") for name, job_id in session.execute(query))
    return found


def set_baseline(session: Session, name: str, job_id: str | None) -> None:
    is_postgres = session.get_bind().dialect.name == "postgresql"
    insert = postgresql.insert if is_postgres else sqlite.insert
    statement = insert(ExperimentRow).values(name=name, baseline=job_id)
    changes = {"baseline": job_id}
    session.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changes))
