"""Dependencies on the failure of a job and between the jobs of two arrays; preempted jobs that are
held; new limits of running jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0043"
down_revision = "0042"


def upgrade() -> None:
    for name in ("on_failure", "each"):
        column = sa.Column(name, sa.Boolean(), server_default=sa.text("false"), nullable=False)
        op.add_column("job_dependencies", column)
    op.add_column("attempts", sa.Column("hold_asked_by", sa.String(255)))
    limits = sa.Column("limits", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    op.add_column("attempts", limits)
