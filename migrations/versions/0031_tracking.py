"""Searches of documents and metrics; tags, notes and baselines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime
from service.domain.tracking.document_values import StoredValue, Values, defaults

revision = "0031"
down_revision = "0030"

BATCH = 500


def upgrade() -> None:
    op.create_table(
        "job_tags",
        _job_id("job_tags"),
        sa.Column("tag", sa.String(64), primary_key=True),
    )
    op.create_index("ix_job_tags_tag_job_id", "job_tags", ["tag", "job_id"])
    op.create_table(
        "job_annotations",
        _job_id("job_annotations"),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("updated_by", sa.String(255), nullable=False),
    )
    op.create_table(
        "experiments",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column(
            "baseline",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="SET NULL", name="fk_experiments_baseline"),
            nullable=True,
        ),
    )
    op.create_index("ix_experiments_baseline", "experiments", ["baseline"])
    values = op.create_table(
        "document_values",
        sa.Column("holder", sa.String(64), primary_key=True),
        sa.Column("pointer", sa.String(255), primary_key=True),
        sa.Column("number", sa.Float(53), nullable=True),
        sa.Column("text", sa.String(255), nullable=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metric_summaries",
        _job_id("metric_summaries"),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_value", sa.Float(53), nullable=True),
        sa.Column("min_step", sa.BigInteger(), nullable=True),
        sa.Column("min_value", sa.Float(53), nullable=True),
        sa.Column("max_step", sa.BigInteger(), nullable=True),
        sa.Column("max_value", sa.Float(53), nullable=True),
        sqlite_with_rowid=False,
    )
    _fill_values(values)
    op.execute(_SUMMARIES)
    op.create_index(
        "ix_document_values_search", "document_values", ["pointer", "text", "number", "holder"]
    )
    op.create_index(
        "ix_metric_summaries_search",
        "metric_summaries",
        ["key", "last_value", "min_value", "max_value", "job_id"],
    )


def _job_id(table: str) -> sa.Column[str]:
    key = sa.ForeignKey("jobs.id", ondelete="CASCADE", name=f"fk_{table}_job_id")
    return sa.Column("job_id", sa.String(64), key, primary_key=True)


def _fill_values(values: sa.Table) -> None:
    """Each job by itself: jobs of an array share no values that were submitted before."""
    connection = op.get_bind()
    shared = defaults()
    connection.execute(sa.insert(values), list(_rows(shared.holder, shared.values)))
    jobs = sa.table("jobs", sa.column("number"), sa.column("id"), sa.column("spec"))
    query = sa.select(jobs).order_by(jobs.c.number).limit(BATCH)
    last = 0
    while found := connection.execute(query.where(jobs.c.number > last)).all():
        rows = []
        for number, job_id, spec in found:
            document = json.loads(spec) if isinstance(spec, str) else spec
            own = {"": StoredValue(None, shared.holder), **shared.but_for(document)}
            rows += _rows(job_id, own)
            last = number
        connection.execute(sa.insert(values), rows)


def _rows(holder: str, values: Values) -> Iterator[dict[str, Any]]:
    for pointer, value in values.items():
        yield {"holder": holder, "pointer": pointer, "number": value.number, "text": value.text}


_SUMMARIES = """
INSERT INTO metric_summaries
SELECT s.job_id, s.key, c.last_step, c.last_value, low.min_step, low.min_value,
       high.max_step, high.max_value
FROM (
    SELECT job_id, key,
           (SELECT x.id FROM metric_chunks x WHERE x.job_id = m.job_id AND x.rank = 0
              AND x.key = m.key ORDER BY x.attempt DESC, x.first_step DESC LIMIT 1) AS last_id,
           (SELECT x.id FROM metric_chunks x WHERE x.job_id = m.job_id AND x.rank = 0
              AND x.key = m.key AND x.min_value IS NOT NULL ORDER BY x.min_value, x.id LIMIT 1)
             AS min_id,
           (SELECT x.id FROM metric_chunks x WHERE x.job_id = m.job_id AND x.rank = 0
              AND x.key = m.key AND x.max_value IS NOT NULL ORDER BY x.max_value DESC, x.id LIMIT 1)
             AS max_id
    FROM metric_chunks m WHERE rank = 0 GROUP BY job_id, key
) s
JOIN metric_chunks c ON c.id = s.last_id
LEFT JOIN metric_chunks low ON low.id = s.min_id
LEFT JOIN metric_chunks high ON high.id = s.max_id
"""
"""Of jobs that resumed, the extremes are those of all steps, also of those that were repeated."""
