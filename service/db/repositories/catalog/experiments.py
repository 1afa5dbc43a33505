"""SQL for experiments, which are the values of the label `experiment`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import ExperimentRow, JobLabelRow, JobRow
from service.db.repositories.bulk import CHUNK, in_chunks, insert_of, table_of
from service.domain.tracking.search_tree import EXPERIMENT


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


def members(session: Session, name: str, job_ids: Collection[str]) -> list[str]:
    """Return the jobs that belong to the experiment, in the given order."""
    query = select(JobLabelRow.job_id).where(*_in_experiment(name), JobLabelRow.job_id.in_(job_ids))
    found = set(session.scalars(query)) if job_ids else set()
    return [job_id for job_id in job_ids if job_id in found]


def stored(session: Session, name: str) -> ExperimentRow | None:
    """Return what users have stored about the experiment; None if they have stored nothing."""
    return session.get(ExperimentRow, name)


def locked(session: Session, name: str) -> ExperimentRow:
    """Return the experiment's row, which is created if it does not exist. No other transaction can
    change the row until this transaction ends. Jobs must be locked before experiments."""
    new = insert_of(session)(table_of(ExperimentRow)).values(name=name)
    session.execute(new.on_conflict_do_nothing(index_elements=["name"]))
    query = select(ExperimentRow).where(ExperimentRow.name == name).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one()
