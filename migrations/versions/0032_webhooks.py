"""Webhooks with the messages that are to be sent, and what the service measures of itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import BigId, UtcDateTime

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("states", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("queue", sa.String(64), nullable=True),
        sa.Column("labels", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("all_users", sa.Boolean(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("failing_since", UtcDateTime(), nullable=True),
        sa.Column("paused_until", UtcDateTime(), nullable=True),
        sa.Column("disabled_at", UtcDateTime(), nullable=True),
        sa.Column("disabled_code", sa.String(64), nullable=True),
        sa.Column("disabled_message", sa.Text(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_webhooks_owner", "webhooks", ["owner"])
    _partial_index("ix_webhooks_enabled", "webhooks", ["owner"], "disabled_at IS NULL")
    op.create_table(
        "webhook_deliveries",
        sa.Column("number", BigId, primary_key=True),
        sa.Column("webhook_id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("next_try_at", UtcDateTime(), nullable=True),
        sa.Column("tried_at", UtcDateTime(), nullable=True),
        sa.Column("answer_status", sa.BigInteger(), nullable=True),
        sa.Column("answer_body", sa.Text(), nullable=True),
        sa.Column("answer_error", sa.Text(), nullable=True),
        sa.Column("took_s", sa.Float(53), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_webhook_deliveries_webhook_id_number", "webhook_deliveries", ["webhook_id", "number"]
    )
    _partial_index(
        "ix_webhook_deliveries_waiting",
        "webhook_deliveries",
        ["webhook_id", "next_try_at"],
        "next_try_at IS NOT NULL",
    )
    op.create_table(
        "service_metrics",
        sa.Column("metric", sa.String(64), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("part", sa.String(16), primary_key=True),
        sa.Column("value", sa.Float(53), nullable=False),
    )


def _partial_index(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )
