"""Attempts of jobs, events of jobs, hangs, and drills."""

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
    """The slots that the attempt holds, and the slots of its newest grant."""
    carriers: Mapped[list[Any] | None]
    """Ids of all nodes on which the attempt ever had slots: they may have its files or processes.
    Unset if the attempt never changed its size."""
    held: Mapped[dict[str, Any] | None]
    """Maps a node id to the node's `labels` when the attempt got slots on it, and to the
    `slot_seconds` for which it held these up to `held_until`."""
    held_until: Mapped[datetime | None]
    bundle: Mapped[dict[str, Any]]
    roles: Mapped[list[Any] | None]
    """Equal to `JobRow.roles`."""
    silo_round: Mapped[dict[str, Any] | None]
    """A round of silos that has been open for long: its `number`, the indices of the `missing`
    silos, `quorum` and `closes_at`."""
    world_size: Mapped[int]
    cluster_session: Mapped[str]
    cursor: Mapped[dict[str, Any]]
    resume_step: Mapped[int | None]
    """Steps already done when training began; unset until a rank reported the number."""
    first_metric_step: Mapped[int | None]
    first_metric_at: Mapped[datetime | None]
    last_metric_step: Mapped[int | None]
    """The highest step whose metrics rank 0 reported."""
    generation: Mapped[int] = mapped_column(server_default=text("0"))
    """The rendezvous round of the group: above 0 once the group was formed again."""
    slot_seconds: Mapped[dict[str, Any] | None]
    """Slot-seconds of the attempt so far, by `TimeCategory`."""
    ledger_at: Mapped[datetime | None]
    """When the supervisor reported `slot_seconds`, by its clock."""
    lacking: Mapped[int] = mapped_column(server_default=text("0"))
    """Workers that the group waits for, because it can't train on without them. A gossip group
    trains meanwhile."""
    grants: Mapped[int] = mapped_column(server_default=text("0"))
    """The number of grants and recalls of slots so far, which is the number of the newest one."""
    granted: Mapped[list[Any] | None]
    """The slices of the newest grant, until the group has reported the slots that it then holds."""
    recalled: Mapped[list[Any] | None]
    """The slices of the newest recall, until the group has reported the slots that it then
    holds."""
    recalled_at: Mapped[datetime | None]
    """When these slots were recalled."""
    batch_size: Mapped[int | None]
    """Global batch size of the newest grant or recall, if the document gives a range."""
    batch_at: Mapped[datetime | None]
    """When a batch size was last chosen for the attempt."""
    grow_after: Mapped[datetime | None]
    """No slots are granted or recalled before this time."""
    recall_after: Mapped[datetime | None]
    """No slots are recalled before this time, because the group did not release the last ones."""
    grown_at: Mapped[datetime | None]
    """When the attempt was last granted slots beyond the slots on which it trained."""
    shrunk_at: Mapped[datetime | None]
    """When slots were last recalled because other jobs gain more from them."""
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
    """When the attempt was first observed to train or, for a script, to run."""
    finished_at: Mapped[datetime | None]
    receipt: Mapped[dict[str, Any] | None]
    """The state that the attempt restored (`service.ingest.resume_reports`); unset if it restored
    none."""


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
    """A fault that the user injected, and its effect on the job."""

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
