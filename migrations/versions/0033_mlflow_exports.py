"""How far each job was written to MLflow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.create_table(
        "mlflow_exports",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.String(255), nullable=True),
        sa.Column("event_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("after_step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("last_steps", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("artifacts", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("failures", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("not_before", UtcDateTime(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("is_complete", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_mlflow_exports"),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_mlflow_exports_job_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_mlflow_exports_number", "mlflow_exports", ["number"])
    op.create_index(
        "ix_mlflow_exports_open",
        "mlflow_exports",
        ["number"],
        sqlite_where=sa.text("NOT is_complete"),
        postgresql_where=sa.text("NOT is_complete"),
    )
