"""Tables of clients outside the cluster, and of the rounds of their jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class FederatedRoundRow(Base):
    """The latest round of a job, as reported by the aggregating rank."""

    __tablename__ = "federated_rounds"
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int]
    number: Mapped[int]
    name: Mapped[str] = mapped_column(String(64))
    """Name of the round's folder in the storage."""
    is_open: Mapped[bool]
    clients: Mapped[list[Any] | None]
    """Numbers of the clients that are asked for an update; None for all clients."""
    quorum: Mapped[int]
    closes_at: Mapped[datetime]
    """The deadline, after which the round ends as soon as it has a quorum."""
    num_elements: Mapped[int]
    awaits: Mapped[str] = mapped_column(String(32))
    """Kind of message that clients must send: `round_files.UPDATE` or, with secure aggregation, the
    response that is expected in the current phase."""
    update_bytes: Mapped[int]
    """Size of an update. Clients send an update in parts."""
    model_sha256: Mapped[str] = mapped_column(String(64))
    model_size_bytes: Mapped[int]
    form_sha256: Mapped[str] = mapped_column(String(64))
    form_size_bytes: Mapped[int]


class FederatedClientRow(Base):
    """An invited client. Only a hash of the client's token is stored, so that a reader of the
    database can't impersonate the client."""

    __tablename__ = "federated_clients"
    __table_args__ = (UniqueConstraint("job_id", "number"),)
    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]
    """The client's number in its job, starting at 0; identifies the client in rounds, logs and
    files."""
    invited_by: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[datetime]
    joined_at: Mapped[datetime | None]
    """When the token was first used."""
    sent_round: Mapped[str | None] = mapped_column(String(64))
    """Name of the round of the client's latest update. With secure aggregation, the name is
    followed by a slash and the phase of the client's latest response."""
    sent_sha256: Mapped[str | None] = mapped_column(String(64))
    sent_at: Mapped[datetime | None]
    num_sent: Mapped[int]
