"""Indexes along which pages of jobs are walked."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

FILTERS = ("owner", "project", "queue", "state")


def upgrade() -> None:
    for column in ("owner", "project", "queue"):
        op.drop_index(f"ix_jobs_{column}", "jobs")
    for column in FILTERS:
        op.create_index(f"ix_jobs_{column}_id", "jobs", [column, "id"])
    op.drop_index("ix_job_labels_key_value", "job_labels")
    op.create_index("ix_job_labels_key_value_job_id", "job_labels", ["key", "value", "job_id"])
