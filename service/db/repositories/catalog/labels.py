"""SQL for the labels of jobs as one JSON object."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ScalarSelect, func, select

from service.db.models import JobLabelRow, JobRow


def labels_as_json(dialect: str) -> ScalarSelect[Any]:
    """Return a subquery for the labels of the job that the outer query reads. On PostgreSQL, its
    value is NULL for a job without labels."""
    as_object = func.json_object_agg if dialect == "postgresql" else func.json_group_object
    return (
        select(as_object(JobLabelRow.key, JobLabelRow.value, type_=JSON))
        .where(JobLabelRow.job_id == JobRow.id)
        .correlate(JobRow)
        .scalar_subquery()
    )
