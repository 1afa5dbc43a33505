"""Reports: pages of Markdown with charts and tables of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0064"
down_revision = "0063"


def upgrade() -> None:
    op.create_table(
        "reports",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("title", sa.String(300), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255)),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("updated_by", sa.String(255), nullable=False),
    )
    op.create_index("ix_reports_owner_id", "reports", ["owner", "id"])
    op.create_index("ix_reports_project_id", "reports", ["project", "id"])
