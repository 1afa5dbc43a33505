"""The newest value and the extremes of each series, for searching and comparing jobs."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy.orm import Session

from service.db.repositories.telemetry import metric_summaries as repository
from service.db.repositories.telemetry.metric_summaries import MetricSummary
from service.domain.series import Summary
from service.telemetry import metric_reader
from service.telemetry.chunk_columns import columns_of


def merge(session: Session, job_id: str, summaries: Mapping[str, Summary]) -> None:
    """Merge summaries of later points, by key, into the stored summaries. Idempotent."""
    repository.merge(session, job_id, _as_rows(summaries))


def replace(session: Session, job_id: str) -> None:
    """Recompute the job's summaries from all valid points."""
    repository.replace(session, job_id, _as_rows(metric_reader.summaries(session, job_id)))


def _as_rows(summaries: Mapping[str, Summary]) -> dict[str, MetricSummary]:
    names = MetricSummary.__dataclass_fields__
    rows = {}
    for key, summary in summaries.items():
        columns = columns_of(summary)
        rows[key] = MetricSummary(**{name: columns[name] for name in names})
    return rows
