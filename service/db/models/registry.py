"""Tables of the registry of models."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base
from service.db.types import BigId


class ModelRow(Base):
    """A registered model. The row of a deleted model is kept, so that the numbers of its versions
    are never used again."""

    __tablename__ = "models"
    folded: Mapped[str] = mapped_column(String(800), primary_key=True)
    """The name without regard to case (`model_names.same_name`)."""
    name: Mapped[str] = mapped_column(String(200))
    owner: Mapped[str] = mapped_column(String(255))
    last_version: Mapped[int]
    """The highest number that was ever given to a version."""
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class ModelVersionRow(Base):
    """A version of a model. It prevents the deletion of its job."""

    __tablename__ = "model_versions"
    folded: Mapped[str] = mapped_column(
        String(800), ForeignKey("models.folded", ondelete="CASCADE"), primary_key=True
    )
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id"), index=True)
    step: Mapped[int | None]
    """Step of the checkpoint; unset for the job's result."""
    init_step: Mapped[int | None]
    """Step of the checkpoint from which jobs with `init_from` start; unset if there is none."""
    card: Mapped[str]
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(String(255))


class ModelAliasRow(Base):
    """An alias, which refers to one version."""

    __tablename__ = "model_aliases"
    folded: Mapped[str] = mapped_column(
        String(800), ForeignKey("models.folded", ondelete="CASCADE"), primary_key=True
    )
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int]


class AliasMoveRow(Base):
    """A change of an alias."""

    __tablename__ = "model_alias_moves"
    __table_args__ = (
        Index("ix_model_alias_moves_folded_number", "folded", "number"),
        {"sqlite_autoincrement": True},
    )
    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    folded: Mapped[str] = mapped_column(
        String(800), ForeignKey("models.folded", ondelete="CASCADE")
    )
    alias: Mapped[str] = mapped_column(String(63))
    from_version: Mapped[int | None]
    to_version: Mapped[int | None]
    moved_at: Mapped[datetime]
    moved_by: Mapped[str] = mapped_column(String(255))
