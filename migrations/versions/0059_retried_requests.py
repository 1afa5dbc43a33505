"""Keys of repeated fine-tuning requests, and expiration times of uploaded files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0059"
down_revision = "0058"


def upgrade() -> None:
    op.add_column("data_files", sa.Column("expires_at", UtcDateTime()))
    op.create_index("ix_data_files_expires_at", "data_files", ["expires_at"])
    op.create_table(
        "tuning_keys",
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "fingerprint", name="pk_tuning_keys"),
    )
