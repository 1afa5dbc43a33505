"""The newest metrics of attempts: a row for each reply, until chunks take them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import BigId

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.create_table(
        "recent_metrics",
        sa.Column("id", BigId, primary_key=True),
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_recent_metrics_job_id"),
            nullable=False,
        ),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
    )
    op.create_index("ix_recent_metrics_job_id_attempt", "recent_metrics", ["job_id", "attempt"])
