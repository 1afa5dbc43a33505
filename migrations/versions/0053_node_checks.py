"""Self-tests of nodes, and the errors of programs on GPUs that were counted instead of reported."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0053"
down_revision = "0052"


def upgrade() -> None:
    op.create_table(
        "node_checks",
        sa.Column("hostname", sa.String(255), primary_key=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(16), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("attempt", sa.BigInteger()),
        sa.Column("asked_at", UtcDateTime(), nullable=False),
        sa.Column("began_at", UtcDateTime()),
        sa.Column("ended_at", UtcDateTime()),
        sa.Column("outcome", sa.String(16)),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
    )
    op.create_table(
        "program_faults",
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_program_faults_job_id"),
            primary_key=True,
        ),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column("reported_at", UtcDateTime(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
    )
    op.add_column(
        "withheld", sa.Column("count", sa.BigInteger(), nullable=False, server_default=sa.text("1"))
    )
