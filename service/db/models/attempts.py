"""Attempts of jobs, the events of jobs, and what became of faults."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from dray.views import JobState
from service.db.models.base import Base, job_key


class AttemptRow(Base):
    __tablename__ = "attempts"
    __table_args__ = (
        Index(
            "uq_attempts_one_live",
            "job_id",
            unique=True,
            sqlite_where=text("finished_at IS NULL"),
            postgresql_where=text("finished_at IS NULL"),
        ),
        Index(
            "ix_attempts_finished_at",
            "finished_at",
            sqlite_where=text("finished_at IS NOT NULL"),
            postgresql_where=text("finished_at IS NOT NULL"),
        ),
    )
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    phase: Mapped[str] = mapped_column(String(16))
    slices: Mapped[list[Any]]
    """The slots that it holds, also those of a grant: nobody else may be given them."""
    carriers: Mapped[list[Any] | None]
    """Ids of all nodes that ever were among its slices: they may have files or processes of it.
    Unset of an attempt that never changed its size."""
    held: Mapped[dict[str, Any] | None]
    """By node id, its `labels` when the attempt got slots there, and the `slot_seconds` that these
    were held up to `held_until`."""
    held_until: Mapped[datetime | None]
    bundle: Mapped[dict[str, Any]]
    roles: Mapped[list[Any] | None]
    """As of its job."""
    silo_round: Mapped[dict[str, Any] | None]
    """A round of silos that is open for long: `number`, `missing` as places of silos, `quorum` and
    `closes_at`."""
    world_size: Mapped[int]
    cluster_session: Mapped[str]
    cursor: Mapped[dict[str, Any]]
    resume_step: Mapped[int | None]
    """Steps already done when training began; unset until a rank said so."""
    first_metric_step: Mapped[int | None]
    first_metric_at: Mapped[datetime | None]
    last_metric_step: Mapped[int | None]
    """The highest that rank 0 reported."""
    generation: Mapped[int] = mapped_column(server_default=text("0"))
    """The rendezvous round of its group: above 0 once the group was formed again."""
    slot_seconds: Mapped[dict[str, Any] | None]
    """How the slots of the attempt were used so far, by `TimeCategory`."""
    ledger_at: Mapped[datetime | None]
    """When the supervisor reported `slot_seconds`, by its clock."""
    lacking: Mapped[int] = mapped_column(server_default=text("0"))
    """Workers without which the group can't train on, so that it stands by for them. Gossip trains
    while slots are asked for these."""
    grants: Mapped[int] = mapped_column(server_default=text("0"))
    """How often the attempt was granted slots or asked to give some back: the newest number."""
    granted: Mapped[list[Any] | None]
    """The slices of the newest grant, until the group has reported what it holds since."""
    recalled: Mapped[list[Any] | None]
    """Slices that the group was asked to give back, until it has reported what it holds since."""
    recalled_at: Mapped[datetime | None]
    """When it was asked for them."""
    batch_size: Mapped[int | None]
    """Global batch that goes with the newest grant or recall, where the document gives a range."""
    batch_at: Mapped[datetime | None]
    """When a batch was chosen for it last."""
    grow_after: Mapped[datetime | None]
    """No slots are granted or asked back before."""
    recall_after: Mapped[datetime | None]
    """No slots are asked back before: the group kept those that it was asked for."""
    grown_at: Mapped[datetime | None]
    """When it was granted slots last beyond those that it trained on."""
    shrunk_at: Mapped[datetime | None]
    """When slots were asked back last because others gain more by them."""
    growth: Mapped[dict[str, Any] | None]
    """Why the group does not grow: `code`, `message`, `blocked_by`."""
    preempt_asked_at: Mapped[datetime | None]
    """When the attempt was asked to leave its slots."""
    silent: Mapped[list[Any] | None]
    """Processes of the attempt that do not answer, each with `kind`, `node_id` and `since`."""
    preempt_grace_s: Mapped[float | None]
    num_errors: Mapped[int]
    reason_code: Mapped[str | None] = mapped_column(String(64))
    reason_message: Mapped[str | None]
    failed_rank: Mapped[int | None]
    exit_code: Mapped[int | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    """When the slots were given, by the supervisor's clock."""
    running_at: Mapped[datetime | None]
    """When it was seen to train, or a script to run, for the first time."""
    finished_at: Mapped[datetime | None]
    receipt: Mapped[dict[str, Any] | None]
    """The state that the attempt restored (`service.ingest.resume_reports`); unset of one that
    began from nothing."""


class EventRow(Base):
    __tablename__ = "events"
    job_id: Mapped[str] = job_key()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(64))
    from_state: Mapped[JobState | None]
    to_state: Mapped[JobState | None]
    attempt: Mapped[int]
    code: Mapped[str] = mapped_column(String(64))
    message: Mapped[str]
    data: Mapped[dict[str, Any]]


class HangRow(Base):
    """A hang of a group: which ranks stood still, and where each rank was."""

    __tablename__ = "hangs"
    job_id: Mapped[str] = job_key()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    time: Mapped[datetime]
    body: Mapped[dict[str, Any]]
    """`views.Hang`, without the fields that are columns here."""


class DrillRow(Base):
    """A fault that the user asked for, and its effect on the job."""

    __tablename__ = "drills"
    __table_args__ = (
        Index(
            "ix_drills_waiting",
            "job_id",
            sqlite_where=text("state = 'waiting'"),
            postgresql_where=text("state = 'waiting'"),
        ),
    )
    job_id: Mapped[str] = job_key()
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int]
    """The attempt into which the fault is injected."""
    kind: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int]
    at_step: Mapped[int | None]
    resumes: Mapped[bool]
    """Whether the drill is to end the attempt, so that the next one shows its effect."""
    state: Mapped[str] = mapped_column(String(16))
    step: Mapped[int | None]
    recovery_s: Mapped[float | None]
    steps_lost: Mapped[int | None]
    message: Mapped[str]
    created_at: Mapped[datetime]
    struck_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
