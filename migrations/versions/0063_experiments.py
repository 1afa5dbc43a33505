"""Notes, pinned jobs and chart layouts of experiments, with a revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0063"
down_revision = "0062"


def upgrade() -> None:
    def add(name: str, kind: sa.types.TypeEngine[object], default: str) -> None:
        column = sa.Column(name, kind, nullable=False, server_default=sa.text(default))
        op.add_column("experiments", column)

    add("notes", sa.Text(), "''")
    add("pinned", sa.JSON(none_as_null=True), "'[]'")
    add("layout", sa.JSON(none_as_null=True), "'{}'")
    add("revision", sa.BigInteger(), "0")
    op.add_column("experiments", sa.Column("updated_at", UtcDateTime()))
    op.add_column("experiments", sa.Column("updated_by", sa.String(255)))
