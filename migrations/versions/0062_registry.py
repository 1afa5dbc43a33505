"""The registry of models: names, versions, aliases and their changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import BigId, UtcDateTime

revision = "0062"
down_revision = "0061"


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("folded", sa.String(800), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("last_version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("deleted_at", UtcDateTime()),
    )
    op.create_table(
        "model_versions",
        _of_model(primary_key=True),
        sa.Column("version", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("step", sa.BigInteger()),
        sa.Column("init_step", sa.BigInteger()),
        sa.Column("card", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
    )
    op.create_index("ix_model_versions_job_id", "model_versions", ["job_id"])
    op.create_table(
        "model_aliases",
        _of_model(primary_key=True),
        sa.Column("alias", sa.String(63), primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "model_alias_moves",
        sa.Column("number", BigId, primary_key=True),
        _of_model(nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("from_version", sa.BigInteger()),
        sa.Column("to_version", sa.BigInteger()),
        sa.Column("moved_at", UtcDateTime(), nullable=False),
        sa.Column("moved_by", sa.String(255), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_model_alias_moves_folded_number", "model_alias_moves", ["folded", "number"])


def _of_model(**options: bool) -> sa.Column[str]:
    key = sa.ForeignKey("models.folded", ondelete="CASCADE")
    return sa.Column("folded", sa.String(800), key, **options)
