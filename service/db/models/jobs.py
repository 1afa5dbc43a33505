"""Tables of jobs, their labels, dependencies and idempotency keys, arrays and sweeps."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, ForeignKey, Index, String, case, func, text
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from dray.spec.training.parallel import AXES
from dray.views import JobState
from service.db.models.base import Base, job_key
from service.db.types import BigId

FIRST_POSITIONS = "position <= 20"
"""Condition that selects the jobs that an explanation can list as ahead of a waiting job. Only
these jobs are indexed by position, because whenever a job starts, the positions of all jobs behind
it change."""

UNFINISHED_RUN = "schedule_id IS NOT NULL AND finished_at IS NULL"

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
            for column in ("init_from_job", "code", "deleted_at")
        ),
        *(
            Index(
                f"ix_jobs_{column}_id",
                *(column, "id"),
                sqlite_where=text(f"{column} IS NOT NULL"),
                postgresql_where=text(f"{column} IS NOT NULL"),
            )
            for column in ("started_at", "finished_at", "ran_s")
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
        *(
            Index(
                name,
                *columns,
                sqlite_where=text(condition),
                postgresql_where=text(condition),
            )
            for name, columns, condition in (
                ("ix_jobs_schedule_id_id", ("schedule_id", "id"), "schedule_id IS NOT NULL"),
                ("ix_jobs_reservation_id", ("reservation", "id"), "reservation IS NOT NULL"),
                ("ix_jobs_unfinished_runs", ("schedule_id",), UNFINISHED_RUN),
            )
        ),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    """Order of submission; numbers are never reused."""
    id: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str]
    owner: Mapped[str] = mapped_column(String(255))
    project: Mapped[str] = mapped_column(String(255))
    queue: Mapped[str] = mapped_column(String(64))
    priority: Mapped[int]
    rank: Mapped[int] = mapped_column(server_default=text("0"))
    """Order among jobs with the same priority, lowest first. A job that is moved to the front gets
    a rank below all other ranks."""
    held_by: Mapped[str | None] = mapped_column(String(255))
    """Name of the user who put the waiting job on hold; unset if it is not on hold."""
    spec: Mapped[dict[str, Any]]
    spec_version: Mapped[int]
    num_workers: Mapped[int]
    """Number of slots of a complete group, including its spares."""
    num_spares: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of spares of a complete group."""
    spares_ready: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the latest attempt's spares that can take the rank of a lost worker."""
    memory_copies: Mapped[dict[str, Any] | None]
    """The newest complete copy of the state in the memory of the latest attempt's ranks, as
    `MemoryCopiesReport.body`; unset if there is none."""
    min_workers: Mapped[int | None]
    """Minimum number of workers with which an elastic job starts and trains; unset if the job is
    not elastic."""
    bundle: Mapped[dict[str, Any]]
    """Ray resources of one worker, derived from the document."""
    roles: Mapped[list[Any] | None]
    """The `role`, `first_rank`, `number` and `bundle` of each role that has its own resources."""
    required_topology: Mapped[str | None] = mapped_column(String(63))
    """Level of the topology. The whole job must be placed in a single domain of this level. Unset
    if there is no such requirement."""
    homes: Mapped[list[Any] | None]
    """Labels that each worker's node must have, except for the first worker's node (see
    `placement.pinned_nodes.PinnedNodes`)."""
    silo_sources: Mapped[list[Any] | None]
    """URLs of the data of federated silos, in the order of the silos; null for a silo whose node
    defines the URL. The URLs are not part of the stored document, and each URL is sent only to the
    rank of its silo."""
    init_from: Mapped[dict[str, Any] | None]
    """The checkpoint that `spec.init_from` referred to when the job was submitted (an
    `init_from.InitFromCheckpoint`)."""
    init_from_job: Mapped[str | None] = mapped_column(String(64))
    """The job whose files this job needs: its checkpoint to start from, or its result as the base
    model."""
    code: Mapped[str | None] = mapped_column(String(64))
    """Id of the uploaded code that the job runs; unique only per owner."""
    array_id: Mapped[str | None] = mapped_column(String(64))
    """Id of the job's array; unset if the job is not part of an array."""
    array_index: Mapped[int | None]
    array_head: Mapped[str | None] = mapped_column(String(64))
    """Equal to `array_id` for the one job that represents its array in lists; otherwise unset."""
    array_max_running: Mapped[int | None]
    """Maximum number of the array's jobs that can have slots at the same time; unset if there is no
    limit."""

    colour: Mapped[int | None]
    """Number of the colour of the job's curves; unset unless a user has chosen one."""

    schedule_id: Mapped[str | None] = mapped_column(String(64))
    """Id of the schedule that submitted the job; unset, like `scheduled_at`, for other jobs."""
    scheduled_at: Mapped[str | None] = mapped_column(String(32))
    """The time of the run, in ISO 8601 with the schedule's offset from UTC."""

    state: Mapped[JobState]
    reason_code: Mapped[str] = mapped_column(String(64))
    reason_message: Mapped[str]
    position: Mapped[int | None]
    """Position of a waiting job in the latest plan, starting at 1."""
    blocked_by: Mapped[list[Any]]
    kept_back_s: Mapped[float] = mapped_column(server_default=text("0"))
    """Total seconds for which the waiting job was on hold, or was waiting for other jobs or for its
    array."""
    kept_back_since: Mapped[datetime | None]
    """The time at which the current period that counts towards `kept_back_s` began; unset if there
    is no such period."""
    eligible_at: Mapped[datetime | None]
    """Since when the waiting job could have started: the end of the latest period that counts
    towards `kept_back_s`, or the end of its latest attempt. Unset if the job has been able to start
    since its submission."""
    attempt: Mapped[int]
    world_size: Mapped[int]
    not_before: Mapped[datetime | None]
    """The time before which the job is not retried."""
    begin_at: Mapped[datetime | None]
    """The time before which the job does not start; unset if it had passed at submission."""
    deadline: Mapped[datetime | None]
    """The time at which the job is cancelled."""
    reservation: Mapped[str | None] = mapped_column(String(64))
    """The reservation in which the job runs; unset if its document names none."""
    singleton: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the job waits for its owner's other jobs with the same name."""
    yields: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the job saves its state when asked to release its slots, and later resumes from this
    state."""
    event_seq: Mapped[int]
    """Number of the latest event."""

    user_failures: Mapped[int]
    infra_failures: Mapped[int]
    free_requeues: Mapped[int]
    preemptions: Mapped[int]
    max_user_retries: Mapped[int]
    max_infra_retries: Mapped[int]
    """The value of the service's setting when the job was submitted. The same applies to
    `log_limit_bytes`."""
    max_runtime_s: Mapped[int | None]
    is_runtime_of_queue: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether `max_runtime_s` is the queue's default, because the document has no limit."""
    runtime_used_s: Mapped[float]
    recoveries: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of times that the job recovered in place."""
    slot_seconds: Mapped[dict[str, Any] | None]
    """Slot-seconds of all attempts of the job, by `TimeCategory`; unset until an attempt has
    reported any."""
    cost: Mapped[dict[str, Any] | None]
    """Cost of all attempts: `currency`, `total`, `useful`, `wasted`, `unreported`; unset until
    slots of the job have been priced."""

    progress: Mapped[dict[str, Any] | None]
    step_times: Mapped[dict[str, Any] | None]
    """Step times of an elastic recipe (see `service.ingest.step_times`): `alike`, the current
    `batch_size`, `micro_batch_size`, and `times`, a list of [workers, nodes, batch size, seconds].
    If the document has a batch range, the value also contains `batch_range` and, once it has been
    measured, `noise_scale`."""
    summary: Mapped[dict[str, Any]]
    warnings: Mapped[list[Any] | None]
    """Warnings to show with the job, each with a code and a message."""
    num_metric_keys: Mapped[int]
    log_bytes: Mapped[int]
    log_limit_bytes: Mapped[int]
    log_lines_dropped: Mapped[int]

    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    first_step_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    ran_s: Mapped[float | None]
    """Seconds from `started_at` to `finished_at`; unset until the job has ended, and if it never
    started."""
    deleted_at: Mapped[datetime | None]
    """Set while the job is being deleted. A job that is being deleted is no longer visible."""

    @property
    def num_parts(self) -> int:
        """Number of workers that hold one replica of an elastic job's model. 1 for all other
        jobs."""
        parallel = self.spec.get("parallel") or {}
        return 1 if self.min_workers is None else math.prod(parallel.get(a, 1) for a in AXES)


def num_parts(c: ReadOnlyColumnCollection[str, Any]) -> ColumnElement[int]:
    """Return `JobRow.num_parts` as an expression of the table's columns."""
    product: ColumnElement[int] = case((c.min_workers.is_(None), 1), else_=_product(c))
    return product.label("num_parts")


def _product(c: ReadOnlyColumnCollection[str, Any]) -> ColumnElement[int]:
    first, *others = (func.coalesce(c.spec["parallel", axis].as_integer(), 1) for axis in AXES)
    product: ColumnElement[int] = first
    for size in others:
        product = product * size
    return product


class JobLabelRow(Base):
    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_key_value_job_id", "key", "value", "job_id"),)
    job_id: Mapped[str] = job_key()
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(255))


class JobDependencyRow(Base):
    """A dependency of a job or array on a job or array that has not ended.

    The row is deleted in the transaction that settles the dependency. Therefore, as long as the row
    exists, `after_id` has not ended, and `waiter` has never started. With `each`, a job of `waiter`
    may have started if the job with the same index in `after_id` has ended.
    """

    __tablename__ = "job_dependencies"
    __table_args__ = (Index("ix_job_dependencies_after_id", "after_id"),)
    waiter: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Id of the waiting job, or of the array whose jobs are all waiting."""
    after_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    on_success: Mapped[bool]
    """Whether job `after_id` must succeed; if neither this nor `on_failure` is set, the job only
    has to end."""
    on_failure: Mapped[bool] = mapped_column(server_default=text("false"))
    each: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether each job of the array `waiter` waits only for the job with the same index."""


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
    """The foreign key is checked on commit, because the idempotency key is reserved before the job
    is written."""
    drill_id: Mapped[str | None] = mapped_column(String(64))
    """Set if the request was for a drill of this job."""
    created_at: Mapped[datetime]


class SweepRow(Base):
    """A sweep, which is an array of trials. The documents of the trials do not contain `sweep`."""

    __tablename__ = "sweeps"
    array_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    sweep: Mapped[dict[str, Any]]
    """`dray.spec.Sweep`"""
    base: Mapped[dict[str, Any]]
    """The document as written by the user, into which the values of each trial are inserted."""
    num_trials: Mapped[int]


class TrialRow(Base):
    """A job of a sweep. Non-finite numbers are stored as NULL, both in this table and in
    `trial_rungs`."""

    __tablename__ = "trials"
    __table_args__ = (
        Index("uq_trials_array_id_array_index", "array_id", "array_index", unique=True),
    )
    job_id: Mapped[str] = job_key()
    array_id: Mapped[str] = mapped_column(String(64))
    array_index: Mapped[int]
    parameters: Mapped[dict[str, Any] | None]
    """The trial's values, keyed by name; unset until the sampler has chosen them."""
    value: Mapped[float | None]
    """The trial's value of the metric: the best or the last value, depending on the sweep's
    `by`."""
    value_step: Mapped[int | None]
    last_step: Mapped[int | None]
    rung: Mapped[int | None]


class TrialRungRow(Base):
    """The value by which a trial was compared with others at a rung of successive halving."""

    __tablename__ = "trial_rungs"
    array_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    rung: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    value: Mapped[float | None]
