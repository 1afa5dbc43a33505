"""Tables of uploaded code and of the packs that contain its parts."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base


class CodeRow(Base):
    """Code that was uploaded completely. The manifest of the code is in the storage."""

    __tablename__ = "code"
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    num_files: Mapped[int]
    size_bytes: Mapped[int]
    manifest_key: Mapped[str]
    """Storage key of the manifest. The manifest contains the position of each part."""
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]
    """When the code was last uploaded or submitted. Code that no job uses is eventually deleted."""


class CodePackRow(Base):
    """A storage object: the parts uploaded by one request, or a manifest."""

    __tablename__ = "code_packs"
    __table_args__ = (Index("ix_code_packs_owner", "owner"),)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    size_bytes: Mapped[int]
    used_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]
    """Set while the object is being deleted, after the rows of its parts have been deleted."""


class CodePartRow(Base):
    """The position of a part. Only the part's owner can use a hash to find out whether the part
    exists."""

    __tablename__ = "code_parts"
    __table_args__ = (Index("ix_code_parts_pack", "pack"),)
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    pack: Mapped[str] = mapped_column(String(255), ForeignKey("code_packs.key", ondelete="CASCADE"))
    start: Mapped[int]
    size_bytes: Mapped[int]


class CodeUseRow(Base):
    """A pack that contains parts of the code with the id `code`."""

    __tablename__ = "code_uses"
    __table_args__ = (
        ForeignKeyConstraint(["owner", "code"], ["code.owner", "code.id"], ondelete="CASCADE"),
        Index("ix_code_uses_pack", "pack"),
    )
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    pack: Mapped[str] = mapped_column(String(255), ForeignKey("code_packs.key"), primary_key=True)
