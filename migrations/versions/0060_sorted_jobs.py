"""Saved views, and values by which lists of jobs are sorted: best values of metrics, costs, running
times, and named arguments of scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime
from service.domain.tracking.document_values import PARAMETERS, searchable
from service.domain.tracking.metric_directions import is_minimised

revision = "0060"
down_revision = "0059"

CHUNK = 500


def upgrade() -> None:
    _running_times()
    _costs()
    _best_values()
    _parameters()
    _saved_views()


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _running_times() -> None:
    op.add_column("jobs", sa.Column("ran_s", sa.Float(53)))
    took = "max(0.0, (julianday(finished_at) - julianday(started_at)) * 86400.0)"
    if not _is_sqlite():
        took = "greatest(0.0, extract(epoch FROM finished_at - started_at))"
    op.execute(
        f"UPDATE jobs SET ran_s = {took} WHERE finished_at IS NOT NULL AND started_at IS NOT NULL"
    )
    op.drop_index("ix_jobs_finished_at", "jobs")
    for column in ("started_at", "finished_at", "ran_s"):
        is_set = sa.text(f"{column} IS NOT NULL")
        op.create_index(
            f"ix_jobs_{column}_id",
            "jobs",
            [column, "id"],
            sqlite_where=is_set,
            postgresql_where=is_set,
        )


def _costs() -> None:
    op.create_table(
        "job_costs",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("total", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_job_costs_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_costs"),
    )
    total = "json_extract(cost, '$.total')" if _is_sqlite() else "(cost ->> 'total')::float8"
    op.execute(
        f"INSERT INTO job_costs (job_id, total) SELECT id, {total} FROM jobs WHERE cost IS NOT NULL"
    )
    op.create_index("ix_job_costs_total_job_id", "job_costs", ["total", "job_id"])


def _best_values() -> None:
    no = sa.text("false")
    op.add_column(
        "metric_summaries", sa.Column("minimised", sa.Boolean(), nullable=False, server_default=no)
    )
    op.add_column("metric_summaries", sa.Column("best_value", sa.Float(53)))
    op.add_column("metric_summaries", sa.Column("as_of", UtcDateTime()))
    connection = op.get_bind()
    keys = connection.scalars(sa.text("SELECT DISTINCT key FROM metric_summaries")).all()
    if low := [{"key": key} for key in keys if is_minimised(key)]:
        connection.execute(
            sa.text("UPDATE metric_summaries SET minimised = true WHERE key = :key"), low
        )
    for array_id, sweep in _read("SELECT array_id, sweep FROM sweeps"):
        metric, mode = sweep.get("metric"), sweep.get("mode")
        if mode is not None and (mode == "min") != is_minimised(metric):
            trials = "SELECT job_id FROM trials WHERE array_id = :array_id"
            connection.execute(
                sa.text(
                    "UPDATE metric_summaries SET minimised = :minimised "
                    f"WHERE key = :key AND job_id IN ({trials})"
                ),
                {"minimised": mode == "min", "key": metric, "array_id": array_id},
            )
    op.execute(
        "UPDATE metric_summaries "
        "SET best_value = CASE WHEN minimised THEN min_value ELSE max_value END"
    )
    op.create_index("ix_metric_summaries_best", "metric_summaries", ["key", "best_value", "job_id"])


def _parameters() -> None:
    shared = sa.text("holder < 'job-'")
    op.create_index(
        "ix_document_values_shared",
        "document_values",
        ["pointer", "number", "holder"],
        sqlite_where=shared,
        postgresql_where=shared,
    )
    script = "json_extract(spec, '$.script')" if _is_sqlite() else "spec ->> 'script'"
    insert = sa.text(
        "INSERT INTO document_values (holder, pointer, number, text) "
        "VALUES (:holder, :pointer, :number, :text) ON CONFLICT DO NOTHING"
    )
    rows: list[dict[str, Any]] = []
    connection = op.get_bind()
    for job_id, spec in _read(f"SELECT id, spec FROM jobs WHERE {script} IS NOT NULL"):
        for pointer, value in searchable({"script": spec["script"]}).items():
            if pointer.startswith(f"/{PARAMETERS}"):
                rows.append({"holder": job_id, "pointer": pointer, **value._asdict()})
        if len(rows) >= CHUNK:
            connection.execute(insert, rows)
            rows = []
    if rows:
        connection.execute(insert, rows)


def _saved_views() -> None:
    op.create_table(
        "saved_views",
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("project", sa.String(255)),
        sa.Column("query", sa.JSON(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "name", name="pk_saved_views"),
    )
    op.create_index(
        "ix_saved_views_project_name_owner", "saved_views", ["project", "name", "owner"]
    )


def _read(query: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ids and documents that the query finds."""
    for row_id, document in op.get_bind().execute(sa.text(query)).all():
        yield row_id, json.loads(document) if isinstance(document, str) else document
