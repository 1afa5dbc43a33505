"""Tables of attempts, events, hangs and drills."""

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
        Index("ix_attempts_times", "job_id", "attempt", "created_at", "finished_at"),
    )
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    queue: Mapped[str | None] = mapped_column(String(64))
    """The job's queue when the attempt began."""
    phase: Mapped[str] = mapped_column(String(16))
    slices: Mapped[list[Any]]
    """The slots that the attempt holds, including the slots in its latest grant."""
    carriers: Mapped[list[Any] | None]
    """Ids of all nodes on which the attempt ever had slots. These nodes might have files or
    processes of the attempt. Unset if the attempt never changed its size."""
    held: Mapped[dict[str, Any] | None]
    """For each node id, the node's `labels` at the time when the attempt got slots on the node, and
    the `slot_seconds` that the attempt used there until `held_until`."""
    held_until: Mapped[datetime | None]
    sizes: Mapped[list[Any] | None]
    """How many slots the attempt held, up to `held_until`: a list of [seconds since 1970, number of
    slots from then on]."""
    bundle: Mapped[dict[str, Any]]
    roles: Mapped[list[Any] | None]
    """Copy of `JobRow.roles`."""
    silo_round: Mapped[dict[str, Any] | None]
    """A round of silos that has been open for a long time: its `number`, the indices of `missing`
    silos, `quorum` and `closes_at`."""
    world_size: Mapped[int]
    cluster_session: Mapped[str]
    cursor: Mapped[dict[str, Any]]
    resume_step: Mapped[int | None]
    """Number of steps that were already complete when the attempt began to train; unset until a
    rank has reported this number."""
    checked_step: Mapped[int | None]
    """Last step after which the replicas of the model were equal, according to
    `check.replicas_every`; unset before the first comparison."""
    corrupted_step: Mapped[int | None]
    """The step after which the replicas of the model were found to differ."""
    first_metric_step: Mapped[int | None]
    """The lowest step for which the script itself reported metrics."""
    first_metric_at: Mapped[datetime | None]
    last_metric_step: Mapped[int | None]
    """The highest step for which rank 0 reported metrics."""
    generation: Mapped[int] = mapped_column(server_default=text("0"))
    """The group's rendezvous round, which is above 0 once the group has been re-formed."""
    slot_seconds: Mapped[dict[str, Any] | None]
    """Slot-seconds of the attempt so far, by `TimeCategory`."""
    ledger_at: Mapped[datetime | None]
    """When the supervisor reported `slot_seconds`, according to its own clock."""
    lacking: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of missing workers that the group waits for, because it can't continue without them.
    (A gossip group continues in the meantime.)"""
    grants: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of grants and recalls of slots so far, which is also the number of the latest grant or
    recall."""
    granted: Mapped[list[Any] | None]
    """The slices of the latest grant; unset once the group has reported its slots after the
    grant."""
    recalled: Mapped[list[Any] | None]
    """The slices of the latest recall; unset once the group has reported its slots after the
    recall."""
    recalled_at: Mapped[datetime | None]
    """When the slots in `recalled` were recalled."""
    batch_size: Mapped[int | None]
    """Global batch size of the latest grant or recall, if the document specifies a range."""
    batch_at: Mapped[datetime | None]
    """When the attempt's batch size was last chosen."""
    grow_after: Mapped[datetime | None]
    """Before this time, slots are neither granted to the attempt nor recalled from it."""
    recall_after: Mapped[datetime | None]
    """Before this time, slots are not recalled. Set if the group did not release the slots of the
    previous recall."""
    grown_at: Mapped[datetime | None]
    """The time at which the attempt, while training, was last granted additional slots."""
    shrunk_at: Mapped[datetime | None]
    """When slots were last recalled because other jobs would gain more from them."""
    growth: Mapped[dict[str, Any] | None]
    """The reason why the group does not grow, with the keys `code`, `message` and `blocked_by`."""
    preempt_asked_at: Mapped[datetime | None]
    """When the attempt was asked to release its slots."""
    silent: Mapped[list[Any] | None]
    """Processes of the attempt that do not respond, each with `kind`, `node_id` and `since`."""
    preempt_grace_s: Mapped[float | None]
    limits: Mapped[int] = mapped_column(server_default=text("0"))
    """How often `max_runtime_s` was changed during the attempt."""
    hold_asked_by: Mapped[str | None] = mapped_column(String(255))
    """Name of the user on whose request the job is held once this attempt has returned it to the
    queue; unset if there was no such request."""
    num_errors: Mapped[int]
    reason_code: Mapped[str | None] = mapped_column(String(64))
    reason_message: Mapped[str | None]
    failed_rank: Mapped[int | None]
    exit_code: Mapped[int | None]
    eligible_at: Mapped[datetime | None]
    """Since when the job could have started; see `JobRow.eligible_at`."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    """When the attempt got its slots, according to the supervisor's clock."""
    running_at: Mapped[datetime | None]
    """When the attempt was first observed to be training or, for a script, running."""
    finished_at: Mapped[datetime | None]
    receipt: Mapped[dict[str, Any] | None]
    """The state that the attempt restored (see `service.ingest.resume_reports`); unset if it did
    not restore a state."""


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
    """A hang of a group: the ranks that made no progress, and each rank's position in the code."""

    __tablename__ = "hangs"
    job_id: Mapped[str] = job_key()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    time: Mapped[datetime]
    body: Mapped[dict[str, Any]]
    """The fields of `views.Hang` that don't have their own columns."""


class DrillRow(Base):
    """A fault that a user injected, and its effect on the job."""

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
    """Whether the drill ends the attempt, so that its effect is observed in the next attempt."""
    state: Mapped[str] = mapped_column(String(16))
    step: Mapped[int | None]
    recovery_s: Mapped[float | None]
    steps_lost: Mapped[int | None]
    message: Mapped[str]
    created_at: Mapped[datetime]
    struck_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
