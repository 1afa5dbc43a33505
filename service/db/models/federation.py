"""The rounds of federated jobs with clients outside of the cluster, and these clients."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class FederatedRoundRow(Base):
    """The newest round of a job, as reported by the rank that aggregates."""

    __tablename__ = "federated_rounds"
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int]
    number: Mapped[int]
    name: Mapped[str] = mapped_column(String(64))
    """The name of the round's folder in the storage."""
    is_open: Mapped[bool]
    clients: Mapped[list[Any] | None]
    """The clients that are asked for an update; None means all."""
    quorum: Mapped[int]
    closes_at: Mapped[datetime]
    """From this time on, a quorum ends the round."""
    num_elements: Mapped[int]
    awaits: Mapped[str] = mapped_column(String(32))
    """The kind of message that clients must send: `round_files.UPDATE`, or with secure aggregation
    the answer of this phase."""
    update_bytes: Mapped[int]
    """The size of an update, which clients send in parts."""
    model_sha256: Mapped[str] = mapped_column(String(64))
    model_size_bytes: Mapped[int]
    form_sha256: Mapped[str] = mapped_column(String(64))
    form_size_bytes: Mapped[int]


class FederatedClientRow(Base):
    """An invited client. The row has only a hash of the client's token, so that a reader of the
    database can't join as the client."""

    __tablename__ = "federated_clients"
    __table_args__ = (UniqueConstraint("job_id", "number"),)
    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]
    """The client's number in its job, from 0; its name in rounds, logs and files."""
    invited_by: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[datetime]
    joined_at: Mapped[datetime | None]
    """When the token was first used."""
    sent_round: Mapped[str | None] = mapped_column(String(64))
    """The name of the round of the client's newest update. With secure aggregation, a slash and the
    phase of its newest answer follow."""
    sent_sha256: Mapped[str | None] = mapped_column(String(64))
    sent_at: Mapped[datetime | None]
    num_sent: Mapped[int]
