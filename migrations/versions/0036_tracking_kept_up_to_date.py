"""Who stands behind a webhook besides its owner; tags and notes of jobs in MLflow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("enabled_by", sa.String(255)))
    op.add_column(
        "mlflow_exports",
        sa.Column("revision", sa.BigInteger(), server_default="0", nullable=False),
    )
    # Runs of jobs that are over lack what was written about them.
    op.execute(
        "UPDATE mlflow_exports SET is_complete = false "
        "WHERE job_id IN (SELECT job_id FROM job_annotations)"
    )
