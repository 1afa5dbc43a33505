"""The table of reservations."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base


class ReservationRow(Base):
    """Nodes that are set aside for some jobs, or for none; see
    `rules.reservations.ReservationRules`."""

    __tablename__ = "reservations"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    begins_at: Mapped[datetime]
    ends_at: Mapped[datetime] = mapped_column(index=True)
    users: Mapped[list[Any]]
    queues: Mapped[list[Any]]
    projects: Mapped[list[Any]]
    nodes: Mapped[list[Any]]
    node_labels: Mapped[dict[str, Any]]
    num_nodes: Mapped[int | None]
    num_gpus: Mapped[int | None]
    all_nodes: Mapped[bool]
    accepts_unnamed: Mapped[bool]
    flex: Mapped[bool]
    at_begin: Mapped[str] = mapped_column(String(16))
    at_end: Mapped[str] = mapped_column(String(16))
    comment: Mapped[str]
    created_by: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[datetime]
    chosen: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    """Ids of the nodes that the scheduler has chosen, if the reservation is for a number of nodes
    or GPUs."""
