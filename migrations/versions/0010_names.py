"""An index along which the jobs of a name are listed."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_index("ix_jobs_name_id", "jobs", ["name", "id"])
