"""Federated jobs whose clients are outside of the cluster."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0037"
down_revision = "0036"


def upgrade() -> None:
    op.create_table(
        "federated_rounds",
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_federated_rounds_job_id"),
            primary_key=True,
        ),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.Column("clients", sa.JSON()),
        sa.Column("quorum", sa.BigInteger(), nullable=False),
        sa.Column("closes_at", UtcDateTime(), nullable=False),
        sa.Column("num_elements", sa.BigInteger(), nullable=False),
        sa.Column("awaits", sa.String(32), nullable=False),
        sa.Column("update_bytes", sa.BigInteger(), nullable=False),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("model_size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("form_sha256", sa.String(64), nullable=False),
        sa.Column("form_size_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "federated_clients",
        sa.Column("token_sha256", sa.String(64), primary_key=True),
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_federated_clients_job_id"),
            nullable=False,
        ),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("invited_by", sa.String(255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("joined_at", UtcDateTime()),
        sa.Column("sent_round", sa.String(64)),
        sa.Column("sent_sha256", sa.String(64)),
        sa.Column("sent_at", UtcDateTime()),
        sa.Column("num_sent", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("job_id", "number", name="uq_federated_clients_job_id_number"),
    )
