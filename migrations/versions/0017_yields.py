"""Whether a job saves its state when it is asked to leave its slots: recipes do."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("yields", sa.Boolean(), nullable=False, server_default=sa.text("false"))
    )
    jobs = sa.table("jobs", sa.column("spec", sa.JSON), sa.column("yields", sa.Boolean))
    script = jobs.c.spec["script"].as_string()
    op.execute(jobs.update().where(script.is_(None)).values(yields=True))
