"""Jobs, with their labels, dependencies and idempotency keys; arrays and sweeps."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from dray.views import JobState
from service.db.models.base import Base, job_key
from service.db.types import BigId

FIRST_POSITIONS = "position <= 20"
"""The jobs that an explanation names as jobs ahead. Only these are indexed by position, because
each start changes the positions of all jobs."""

_LISTED_BY = ("name", "owner", "project", "queue", "state")


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_state_priority_rank_number", "state", "priority", "rank", "number"),
        Index(
            "ix_jobs_unfinished",
            *("queue", "state", "owner"),
            sqlite_where=text("finished_at IS NULL"),
            postgresql_where=text("finished_at IS NULL"),
        ),
        *(Index(f"ix_jobs_{by}_id", by, "id") for by in _LISTED_BY),
        *(
            Index(
                f"ix_jobs_{column}",
                column,
                sqlite_where=text(f"{column} IS NOT NULL"),
                postgresql_where=text(f"{column} IS NOT NULL"),
            )
            for column in ("init_from_job", "code", "finished_at", "deleted_at")
        ),
        *(
            Index(
                name,
                *columns,
                unique=len(columns) == 2,
                sqlite_where=text("array_id IS NOT NULL"),
                postgresql_where=text("array_id IS NOT NULL"),
            )
            for name, columns in (
                ("uq_jobs_array_id_array_index", ("array_id", "array_index")),
                ("ix_jobs_array_id_state_array_index", ("array_id", "state", "array_index")),
            )
        ),
        Index(
            "ix_jobs_first_positions",
            "position",
            sqlite_where=text(FIRST_POSITIONS),
            postgresql_where=text(FIRST_POSITIONS),
        ),
        Index(
            "ix_jobs_step_times",
            "number",
            sqlite_where=text("step_times IS NOT NULL"),
            postgresql_where=text("step_times IS NOT NULL"),
        ),
        Index(
            "ix_jobs_array_head",
            "id",
            sqlite_where=text("array_head IS NOT NULL"),
            postgresql_where=text("array_head IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    """Order of submission; never used twice."""
    id: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str]
    owner: Mapped[str] = mapped_column(String(255))
    project: Mapped[str] = mapped_column(String(255))
    queue: Mapped[str] = mapped_column(String(64))
    priority: Mapped[int]
    rank: Mapped[int] = mapped_column(server_default=text("0"))
    """Orders jobs of equal priority, lowest first. A move to the front takes the next lower
    rank."""
    held_by: Mapped[str | None] = mapped_column(String(255))
    """Name of the caller who holds the waiting job, so that it does not start."""
    spec: Mapped[dict[str, Any]]
    spec_version: Mapped[int]
    num_workers: Mapped[int]
    min_workers: Mapped[int | None]
    """The fewest workers with which an elastic job starts and trains; unset if it is not
    elastic."""
    bundle: Mapped[dict[str, Any]]
    """Ray resources of one worker, derived from the document."""
    roles: Mapped[list[Any] | None]
    """`role`, `first_rank`, `number` and `bundle` of each role that has its own resources."""
    required_topology: Mapped[str | None] = mapped_column(String(63))
    """The topology level of which one domain must hold the whole job; unset if none must."""
    homes: Mapped[list[Any] | None]
    """The labels of the node of each worker but the first: `placement.homes.Homes`."""
    silo_sources: Mapped[list[Any] | None]
    """URLs of the data of federated silos, in their order; null if the silo's node names it. The
    document lacks them, and each is sent only to the rank of its silo."""
    init_from: Mapped[dict[str, Any] | None]
    """The checkpoint that `spec.init_from` meant when the job was submitted:
    `init_from.InitFromCheckpoint`."""
    init_from_job: Mapped[str | None] = mapped_column(String(64))
    code: Mapped[str | None] = mapped_column(String(64))
    """The id of the uploaded code that the job runs; unique only for one owner."""
    array_id: Mapped[str | None] = mapped_column(String(64))
    """The array that the job belongs to; unset if it belongs to none."""
    array_index: Mapped[int | None]
    array_head: Mapped[str | None] = mapped_column(String(64))
    """Equal to `array_id` in the one job that represents its array in lists; else unset."""
    array_max_running: Mapped[int | None]
    """The most jobs of the array that may have slots at a time; unset means any number."""

    state: Mapped[JobState]
    reason_code: Mapped[str] = mapped_column(String(64))
    reason_message: Mapped[str]
    position: Mapped[int | None]
    """The position of a waiting job in the newest plan, from 1."""
    blocked_by: Mapped[list[Any]]
    kept_back_s: Mapped[float] = mapped_column(server_default=text("0"))
    """Seconds for which the waiting job was held, or waited for other jobs or for its array."""
    kept_back_since: Mapped[datetime | None]
    """When the present such period began."""
    attempt: Mapped[int]
    world_size: Mapped[int]
    not_before: Mapped[datetime | None]
    yields: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the job saves its state when it is asked to leave its slots, and resumes from it."""
    event_seq: Mapped[int]
    """Number of the newest event."""

    user_failures: Mapped[int]
    infra_failures: Mapped[int]
    free_requeues: Mapped[int]
    preemptions: Mapped[int]
    max_user_retries: Mapped[int]
    max_infra_retries: Mapped[int]
    """The service's setting when the job was submitted, like `log_limit_bytes`."""
    max_runtime_s: Mapped[int | None]
    runtime_used_s: Mapped[float]
    recoveries: Mapped[int] = mapped_column(server_default=text("0"))
    """How often a group of the job recovered in place."""
    slot_seconds: Mapped[dict[str, Any] | None]
    """Sum over all attempts of the job, by `TimeCategory`; unset until an attempt reported it."""
    cost: Mapped[dict[str, Any] | None]
    """Sum over all attempts: `currency`, `total`, `useful`, `wasted`, `unreported`; unset until
    slots of the job were priced."""

    progress: Mapped[dict[str, Any] | None]
    step_times: Mapped[dict[str, Any] | None]
    """Step times of an elastic recipe (`service.ingest.step_times`): `alike`, the current
    `batch_size`, `micro_batch_size`, and `times`, each [workers, nodes, batch size, seconds]. If
    the document has a range for the batch, also `batch_range`, and `noise_scale` once measured."""
    summary: Mapped[dict[str, Any]]
    warnings: Mapped[list[Any] | None]
    """Warnings that are shown with the job, each with a code and a message."""
    num_metric_keys: Mapped[int]
    log_bytes: Mapped[int]
    log_limit_bytes: Mapped[int]
    log_lines_dropped: Mapped[int]

    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    first_step_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    """Set while the job is being deleted; it is no longer shown."""


class JobLabelRow(Base):
    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_key_value_job_id", "key", "value", "job_id"),)
    job_id: Mapped[str] = job_key()
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(255))


class JobDependencyRow(Base):
    """A job or array that has not ended, and a job or array that starts after it.

    The row is deleted in the transaction that settles it. So `waiter` has never started, and
    `after_id` has not ended."""

    __tablename__ = "job_dependencies"
    __table_args__ = (Index("ix_job_dependencies_after_id", "after_id"),)
    waiter: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Id of a job, or of an array for all its jobs."""
    after_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    on_success: Mapped[bool]
    """Whether `after_id` must succeed; otherwise it must only end."""


class IdempotencyRow(Base):
    __tablename__ = "idempotency_keys"
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str]
    job_id: Mapped[str] = mapped_column(
        String(64),
        ForeignKey("jobs.id", ondelete="CASCADE", deferrable=True, initially="DEFERRED"),
        index=True,
    )
    """Checked at the commit: the key is reserved before its job is written."""
    drill_id: Mapped[str | None] = mapped_column(String(64))
    """Set if the request was for a drill of that job."""
    created_at: Mapped[datetime]


class SweepRow(Base):
    """A sweep: the array of its trials, each of which has a document without `sweep`."""

    __tablename__ = "sweeps"
    array_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    sweep: Mapped[dict[str, Any]]
    """`dray.spec.Sweep`"""
    base: Mapped[dict[str, Any]]
    """The document as the user wrote it, into which the values of each trial are put."""
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
    """The trial's values by name; unset until the sampler was asked for them."""
    value: Mapped[float | None]
    """The value of the metric, chosen by the sweep's `by`."""
    value_step: Mapped[int | None]
    last_step: Mapped[int | None]
    rung: Mapped[int | None]


class TrialRungRow(Base):
    """The value by which a trial was compared on a rung of successive halving."""

    __tablename__ = "trial_rungs"
    array_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    rung: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    value: Mapped[float | None]
