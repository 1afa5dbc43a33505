"""Sweeps, their trials, and the values by which these are judged."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class SweepRow(Base):
    """A sweep: the array of its trials, each of which has a document without `sweep`."""

    __tablename__ = "sweeps"
    array_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    sweep: Mapped[dict[str, Any]]
    """`dray.spec.Sweep`"""
    base: Mapped[dict[str, Any]]
    """The document that the values of a trial are put into, as the user wrote it."""
    num_trials: Mapped[int]


class TrialRow(Base):
    """A job of a sweep. Numbers that are not finite are unset here and in `trial_rungs`."""

    __tablename__ = "trials"
    __table_args__ = (
        Index("uq_trials_array_id_array_index", "array_id", "array_index", unique=True),
    )
    job_id: Mapped[str] = job_key()
    array_id: Mapped[str] = mapped_column(String(64))
    array_index: Mapped[int]
    parameters: Mapped[dict[str, Any] | None]
    """Its values by name; unset until the sampler was asked for them."""
    value: Mapped[float | None]
    """Of the metric, by the sweep's `by`."""
    value_step: Mapped[int | None]
    last_step: Mapped[int | None]
    rung: Mapped[int | None]


class TrialRungRow(Base):
    """The value by which a trial was judged on a rung of successive halving."""

    __tablename__ = "trial_rungs"
    array_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    rung: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    value: Mapped[float | None]
