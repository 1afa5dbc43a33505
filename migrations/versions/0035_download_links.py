"""Links that download one file of a job, once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    op.create_table(
        "download_links",
        sa.Column("secret_sha256", sa.String(64), primary_key=True),
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_download_links_job_id"),
            nullable=False,
        ),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("token_id", sa.String(64)),
        sa.Column("target", sa.JSON(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
    )
