"""Dependencies on the failure of a job and between the jobs of two arrays; preempted jobs that are
held."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0043"
down_revision = "0042"


def upgrade() -> None:
    for column in (
        sa.Column("condition", sa.String(16), server_default="success", nullable=False),
        sa.Column("each", sa.Boolean(), server_default=sa.false(), nullable=False),
    ):
        op.add_column("job_dependencies", column)
    op.execute("UPDATE job_dependencies SET condition = 'end' WHERE NOT on_success")
    op.drop_column("job_dependencies", "on_success")
    op.add_column("attempts", sa.Column("hold_asked_by", sa.String(255)))
