"""Uploaded code: its descriptions, and the parts of files by their hash."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0014"
down_revision = "0013"

Time = UtcDateTime()


def upgrade() -> None:
    op.create_table(
        "code",
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("num_files", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_key", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", Time, nullable=False),
        sa.Column("used_at", Time, nullable=False),
    )
    op.create_table(
        "code_packs",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("used_at", Time, nullable=False),
        sa.Column("deleted_at", Time, nullable=True),
    )
    op.create_index("ix_code_packs_owner", "code_packs", ["owner"])
    op.create_table(
        "code_parts",
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column(
            "pack",
            sa.String(255),
            sa.ForeignKey(
                "code_packs.key", name="fk_code_parts_pack_code_packs", ondelete="CASCADE"
            ),
            nullable=False,
        ),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_code_parts_pack", "code_parts", ["pack"])
    op.create_table(
        "code_uses",
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column(
            "pack",
            sa.String(255),
            sa.ForeignKey("code_packs.key", name="fk_code_uses_pack_code_packs"),
            primary_key=True,
        ),
        sa.ForeignKeyConstraint(
            ["owner", "code"],
            ["code.owner", "code.id"],
            name="fk_code_uses_owner_code",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_code_uses_pack", "code_uses", ["pack"])
    op.add_column("jobs", sa.Column("code", sa.String(64), nullable=True))
    has_code = sa.text("code IS NOT NULL")
    op.create_index(
        "ix_jobs_code", "jobs", ["code"], sqlite_where=has_code, postgresql_where=has_code
    )
