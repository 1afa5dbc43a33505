"""Elastic groups: how small they may be, what they lack, and the slots that they are given."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    none_yet = sa.text("0")
    op.add_column("jobs", sa.Column("min_workers", sa.BigInteger(), nullable=True))
    for name in ("lacking", "grants"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default=none_yet)
        op.add_column("attempts", column)
    for name in ("carriers", "granted", "growth"):
        op.add_column("attempts", sa.Column(name, sa.JSON(none_as_null=True), nullable=True))
    op.add_column("attempts", sa.Column("grow_after", UtcDateTime(), nullable=True))
