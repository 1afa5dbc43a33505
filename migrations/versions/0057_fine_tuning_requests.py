"""Uploaded files, and fine-tuning jobs that were created with OpenAI's protocol."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0057"
down_revision = "0056"


def upgrade() -> None:
    op.create_table(
        "data_files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_lines", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_data_files"),
    )
    op.create_index("ix_data_files_owner_state_id", "data_files", ["owner", "state", "id"])
    op.create_table(
        "tuning_requests",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_tuning_requests_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_tuning_requests"),
    )
    op.create_index("ix_tuning_requests_owner_job_id", "tuning_requests", ["owner", "job_id"])
