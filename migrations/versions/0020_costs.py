"""Costs of attempts, the budgets of queues, and the labels of nodes by which slots are priced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0017"


def upgrade() -> None:
    time, number = sa.DateTime(timezone=True), sa.Float(53)
    op.create_table(
        "attempt_costs",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("since", time, nullable=False),
        sa.Column("until", time, nullable=False),
        sa.Column("currency", sa.String(16), nullable=False),
        *(
            sa.Column(name, number, nullable=False)
            for name in ("slot_seconds", "total", "useful", "unreported")
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_attempt_costs"),
    )
    op.create_index("ix_attempt_costs_until", "attempt_costs", ["until"])
    op.create_index("ix_attempt_costs_queue_until", "attempt_costs", ["queue", "until"])
    op.add_column("jobs", sa.Column("cost", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("attempts", sa.Column("held", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("attempts", sa.Column("held_until", time, nullable=True))
    for name in ("budget", "monthly_budget"):
        op.add_column("queues", sa.Column(name, number, nullable=True))
    labels = sa.Column("labels", sa.JSON(), server_default=sa.text("'{}'"), nullable=False)
    op.add_column("nodes", labels)
