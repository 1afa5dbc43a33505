"""The tables. Rows only: what is done with them is in `repositories`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dray.views import JobState
from service.db.types import BigId, StateType, UtcDateTime

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime(),
        JobState: StateType(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
        int: BigInteger(),
        float: Float(53),
        str: Text(),
        bytes: LargeBinary(),
    }


def _job_key() -> Mapped[str]:
    return mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, sort_order=-1
    )


class DeploymentRow(Base):
    """The one row that says which dray this is."""

    __tablename__ = "deployment"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]


FIRST_POSITIONS = "position <= 20"
"""The jobs that an explanation names of those ahead. They alone are in an index by their position,
since each start changes the positions of all."""

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
    """Among jobs of one priority a lower one goes first: each move to the front takes the next."""
    held_by: Mapped[str | None] = mapped_column(String(255))
    """Name of the caller who holds the waiting job: it does not start."""
    spec: Mapped[dict[str, Any]]
    spec_version: Mapped[int]
    num_workers: Mapped[int]
    min_workers: Mapped[int | None]
    """With how few an elastic one may start and train on; unset of one that keeps its size."""
    bundle: Mapped[dict[str, Any]]
    """Ray resources of one worker, derived from the document."""
    required_topology: Mapped[str | None] = mapped_column(String(63))
    """The level of the topology of which one domain must hold it; unset if none must."""
    init_from: Mapped[dict[str, Any] | None]
    """The checkpoint that `spec.init_from` meant when the job was submitted:
    `init_from.InitFromCheckpoint`."""
    init_from_job: Mapped[str | None] = mapped_column(String(64))
    code: Mapped[str | None] = mapped_column(String(64))
    """The id of the uploaded code that it runs, among its owner's."""
    array_id: Mapped[str | None] = mapped_column(String(64))
    """The array that the job belongs to; unset of one that is alone."""
    array_index: Mapped[int | None]
    array_head: Mapped[str | None] = mapped_column(String(64))
    """As `array_id`, of the one job that stands for its array in lists."""
    array_max_running: Mapped[int | None]
    """As many jobs of the array may have slots at a time; unset: any number."""

    state: Mapped[JobState]
    reason_code: Mapped[str] = mapped_column(String(64))
    reason_message: Mapped[str]
    position: Mapped[int | None]
    """The place of a waiting job in the newest plan, from 1."""
    blocked_by: Mapped[list[Any]]
    kept_back_s: Mapped[float] = mapped_column(server_default=text("0"))
    """Seconds in which the waiting job was held, waited for others to end, or for its array."""
    kept_back_since: Mapped[datetime | None]
    """Since when it is kept back now."""
    attempt: Mapped[int]
    world_size: Mapped[int]
    not_before: Mapped[datetime | None]
    yields: Mapped[bool] = mapped_column(server_default=text("false"))
    """It saves its state when it is asked to leave its slots, and goes on from there."""
    event_seq: Mapped[int]
    """Number of the newest event."""

    user_failures: Mapped[int]
    infra_failures: Mapped[int]
    free_requeues: Mapped[int]
    preemptions: Mapped[int]
    max_user_retries: Mapped[int]
    max_infra_retries: Mapped[int]
    """The service's setting when the job was submitted, as is `log_limit_bytes`."""
    max_runtime_s: Mapped[int | None]
    runtime_used_s: Mapped[float]
    recoveries: Mapped[int] = mapped_column(server_default=text("0"))
    """How often a group of the job recovered in place."""
    slot_seconds: Mapped[dict[str, Any] | None]
    """Of all attempts of the job, by `TimeCategory`; unset until one reported it."""
    cost: Mapped[dict[str, Any] | None]
    """Sum over its attempts: `currency`, `total`, `useful`, `wasted`, `unreported`; unset until
    slots of it were priced."""

    progress: Mapped[dict[str, Any] | None]
    step_times: Mapped[dict[str, Any] | None]
    """Of an elastic recipe (`service.ingest.step_times`): `alike`, `batch_size` in force,
    `micro_batch_size`, `times`, each [workers, nodes, batch size, seconds], and where the document
    has a range for the batch `batch_range`, and `noise_scale` once that was measured."""
    summary: Mapped[dict[str, Any]]
    warnings: Mapped[list[Any] | None]
    """Shown with the job until its end and after: each a code and a message."""
    num_metric_keys: Mapped[int]
    log_bytes: Mapped[int]
    log_limit_bytes: Mapped[int]
    log_lines_dropped: Mapped[int]

    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    first_step_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    """Set while a deletion is under way: the job is no longer shown."""


class QueueRow(Base):
    """The rules of a queue: `service.domain.scheduling.queues.Queue`."""

    __tablename__ = "queues"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    weight: Mapped[float] = mapped_column(server_default=text("1"))
    user_weights: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    quota: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    limit: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    user_limit: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    max_running: Mapped[int | None]
    max_running_per_user: Mapped[int | None]
    max_queued: Mapped[int | None]
    max_queued_per_user: Mapped[int | None]
    max_priority: Mapped[int] = mapped_column(server_default=text("100"))
    budget: Mapped[float | None]
    monthly_budget: Mapped[float | None]


class ForecastRow(Base):
    """When an attempt was expected to start or to end, and when it did.

    A row that is still open is of an attempt that has not started, or ended, yet.
    """

    __tablename__ = "forecasts"
    __table_args__ = (
        Index(
            "ix_forecasts_open",
            "of",
            sqlite_where=text("came_at IS NULL"),
            postgresql_where=text("came_at IS NULL"),
        ),
        Index(
            "ix_forecasts_came_at",
            "came_at",
            sqlite_where=text("came_at IS NOT NULL"),
            postgresql_where=text("came_at IS NOT NULL"),
        ),
    )
    job_id: Mapped[str] = _job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The one that starts or ends; of a waiting job the one after its newest."""
    of: Mapped[str] = mapped_column(String(8), primary_key=True)
    """`start` or `end`."""
    expected_at: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    """Where no time is known, until when the forecast has reached."""
    code: Mapped[str | None] = mapped_column(String(64))
    """With `message` why no time is known."""
    message: Mapped[str | None]
    num_assumed: Mapped[int]
    """Jobs of unknown length that the forecast made an assumption for."""
    made_at: Mapped[datetime]
    first_expected_at: Mapped[datetime | None]
    """The first time that was told; its error is measured."""
    first_made_at: Mapped[datetime | None]
    came_at: Mapped[datetime | None]


class OutlookRow(Base):
    """The situation that the newest forecast began with, and errors of earlier ones; one row."""

    __tablename__ = "outlook"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    made_at: Mapped[datetime]
    situation: Mapped[bytes]
    """`service.outlook.codec`; of many waiting jobs those that come first."""
    errors: Mapped[dict[str, Any]]
    """`views.ForecastErrors`."""


class DecisionRow(Base):
    """A round of the scheduler that changed something, kept for some hours."""

    __tablename__ = "decisions"
    __table_args__ = (Index("ix_decisions_made_at", "made_at"), {"sqlite_autoincrement": True})
    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    made_at: Mapped[datetime]
    summary: Mapped[dict[str, Any]]
    """Jobs that started, grew and left, and how many waited."""
    size_bytes: Mapped[int]
    record: Mapped[bytes]
    """The situation and the decisions: `service.outlook.codec`."""


class JobLabelRow(Base):
    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_key_value_job_id", "key", "value", "job_id"),)
    job_id: Mapped[str] = _job_key()
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(255))


class JobDependencyRow(Base):
    """A job or array that has not ended, and one that starts after it.

    The row is deleted in the transaction that settles it. So a job with such a row has never
    started, and whatever it waits for has not ended."""

    __tablename__ = "job_dependencies"
    __table_args__ = (Index("ix_job_dependencies_after_id", "after_id"),)
    waiter: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Id of a job, or of an array for all its jobs."""
    after_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    on_success: Mapped[bool]
    """Whether `after_id` must succeed; else it must only end."""


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
    job_id: Mapped[str] = _job_key()
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


class MlflowExportRow(Base):
    """How far a job was written to MLflow (`service.tracking`)."""

    __tablename__ = "mlflow_exports"
    __table_args__ = (
        Index("ix_mlflow_exports_number", "number"),
        Index(
            "ix_mlflow_exports_open",
            "number",
            sqlite_where=text("NOT is_complete"),
            postgresql_where=text("NOT is_complete"),
        ),
    )
    job_id: Mapped[str] = _job_key()
    number: Mapped[int]
    """The job's, by which jobs without a row are found."""
    run_id: Mapped[str | None] = mapped_column(String(255))
    """Unset until the run and its parameters are there."""
    event_seq: Mapped[int] = mapped_column(server_default=text("0"))
    """The newest event of the job whose state the run shows."""
    after_step: Mapped[int] = mapped_column(server_default=text("-1"))
    """Points of higher steps are read next."""
    last_steps: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """By the name of a metric, the last step that the run has."""
    artifacts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """By its id, the SHA-256 of each artifact that the run has."""
    failures: Mapped[int] = mapped_column(server_default=text("0"))
    """In a row."""
    not_before: Mapped[datetime | None]
    """After a failure, when the next try may be."""
    problem: Mapped[str | None]
    is_complete: Mapped[bool] = mapped_column(server_default=text("false"))
    """The job is over, and the run has all of it."""


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
    """Set where the request was one for a drill of that job."""
    created_at: Mapped[datetime]


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
    job_id: Mapped[str] = _job_key()
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
    """Workers without which the group can't train on: it stands by for them."""
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
    job_id: Mapped[str] = _job_key()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(64))
    from_state: Mapped[JobState | None]
    to_state: Mapped[JobState | None]
    attempt: Mapped[int]
    code: Mapped[str] = mapped_column(String(64))
    message: Mapped[str]
    data: Mapped[dict[str, Any]]


class MetricChunkRow(Base):
    """Up to `series.CHUNK_POINTS` points of one series of one attempt, steps rising."""

    __tablename__ = "metric_chunks"
    __table_args__ = (
        ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        Index(
            "uq_metric_chunks_series", "job_id", "rank", "key", "attempt", "first_step", unique=True
        ),
        Index("ix_metric_chunks_open", "job_id", "attempt", "is_open"),
        Index("ix_metric_chunks_last_step", "job_id", "rank", "last_step"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64))
    key: Mapped[str]
    attempt: Mapped[int]
    rank: Mapped[int]
    is_open: Mapped[bool]
    """True of the newest chunk of a series: its last step bounds what may follow."""
    count: Mapped[int]
    first_step: Mapped[int]
    first_value: Mapped[float | None]
    """Unset means NaN, here and in `last_value`: SQLite has no NaN."""
    last_step: Mapped[int]
    last_value: Mapped[float | None]
    min_step: Mapped[int | None]
    min_value: Mapped[float | None]
    max_step: Mapped[int | None]
    max_value: Mapped[float | None]
    nan_step: Mapped[int | None]
    outline: Mapped[bytes | None]
    """Extremes of each `series.BLOCK_POINTS` points; unset of a chunk that an older dray wrote."""
    points: Mapped[bytes]


class RecentMetricsRow(Base):
    """The newest points of all series of an attempt, from one reply, until chunks take them.

    Rows begin no series: its first points are in a chunk. They come in the order of `id`.
    """

    __tablename__ = "recent_metrics"
    __table_args__ = (Index("ix_recent_metrics_job_id_attempt", "job_id", "attempt"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    last_step: Mapped[int]
    """The highest of its steps."""
    points: Mapped[bytes]
    """`service.domain.series_rows`"""


class LogChunkRow(Base):
    """Consecutive lines of one rank: in `text` while the chunk is open, then in storage."""

    __tablename__ = "log_chunks"
    job_id: Mapped[str] = _job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_lines: Mapped[int]
    size_bytes: Mapped[int]
    incarnation: Mapped[int]
    """Of the process that wrote the last line."""
    next_number: Mapped[int]
    """The number that process gives its next line; a higher one tells of lines that were lost."""
    text: Mapped[str | None]
    """One JSON array `[time, line]` in each line, or `[time, note, lost]` where lines were lost."""
    storage_key: Mapped[str | None]
    left_out: Mapped[int | None]
    """Of the rank's newest lines, once the job's log has reached its limit: how many lines are left
    out before them. None for the lines before the limit."""


class CheckpointRow(Base):
    __tablename__ = "checkpoints"
    job_id: Mapped[str] = _job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    url: Mapped[str]
    size_bytes: Mapped[int]
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    metrics: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class ArtifactRow(Base):
    __tablename__ = "artifacts"
    job_id: Mapped[str] = _job_key()
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int]
    path: Mapped[str]
    url: Mapped[str]
    size_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]


class HangRow(Base):
    """A hang of a group: which ranks stood still, and where each rank was."""

    __tablename__ = "hangs"
    job_id: Mapped[str] = _job_key()
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
    job_id: Mapped[str] = _job_key()
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


class SlotSecondsRow(Base):
    """Slot-seconds of all jobs that ever were, by category; they only grow."""

    __tablename__ = "slot_seconds"
    slot_class: Mapped[str] = mapped_column(String(32), primary_key=True)
    seconds: Mapped[float]


class AttemptCostRow(Base):
    """The cost of an attempt so far; the row stays when its job is deleted."""

    __tablename__ = "attempt_costs"
    __table_args__ = (
        Index("ix_attempt_costs_until", "until"),
        Index("ix_attempt_costs_queue_until", "queue", "until"),
    )
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    queue: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(255))
    since: Mapped[datetime]
    """When its slots were given."""
    until: Mapped[datetime]
    """Up to when they are counted here: the attempt's newest report, or its end."""
    currency: Mapped[str] = mapped_column(String(16))
    slot_seconds: Mapped[float]
    total: Mapped[float]
    useful: Mapped[float]
    unreported: Mapped[float]
    """Of time whose use nobody can say; what is left of the total is wasted."""


class DeletedAttemptRow(Base):
    """The slots of an ended attempt whose job was deleted: its user has used them all the same."""

    __tablename__ = "deleted_attempts"
    __table_args__ = (Index("ix_deleted_attempts_finished_at", "finished_at"),)
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    queue: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(255))
    slices: Mapped[list[Any]]
    bundle: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime]


class ClusterRow(Base):
    """The cluster as it was last seen; one row."""

    __tablename__ = "cluster"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    connected: Mapped[bool]
    reason: Mapped[str | None]
    ray_address: Mapped[str | None]
    ray_dashboard: Mapped[str | None]
    session: Mapped[str | None]
    updated_at: Mapped[datetime]


class AutoscalingRow(Base):
    """The newest request to Ray's autoscaler; one row."""

    __tablename__ = "autoscaling"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_nodes: Mapped[int]
    """Number of nodes that are to come."""
    bundles: Mapped[list[Any]]
    """The floor under the cluster's size: `[bundle, number]` pairs. Empty once it is withdrawn."""
    asked_at: Mapped[datetime | None]
    """Since when nodes are to come; unset while none is."""


class StorageStateRow(Base):
    """How full the storage was when it was last looked at; one row."""

    __tablename__ = "storage_state"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    used_bytes: Mapped[int | None]
    """Of checkpoints, artifacts and logs by their rows; unset where no setting asks for it."""
    free_bytes: Mapped[int | None]
    """Of the disk under it, the lesser of storage and database; unset of an object store."""
    problem: Mapped[str | None]
    """Why no job is taken or started; unset while there is room."""
    updated_at: Mapped[datetime]


class NodeRow(Base):
    __tablename__ = "nodes"
    node_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    hostname: Mapped[str]
    alive: Mapped[bool]
    accepted: Mapped[bool]
    reason: Mapped[str | None]
    total: Mapped[dict[str, Any]]
    available: Mapped[dict[str, Any]]
    labels: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Ray's labels of the node, such as `ray.io/market-type`."""
    quarantined: Mapped[list[Any]]
    """`ray_workers.shared.quarantine.Quarantined`, as JSON."""
    updated_at: Mapped[datetime]


class LeaseRow(Base):
    """Which process may run the loops, and until when by the database's clock; one row."""

    __tablename__ = "leases"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str]
    term: Mapped[int]
    """Rises each time the lease is taken: the fencing token of what the loops write."""
    expires_at: Mapped[datetime]


class CodeRow(Base):
    """Code that was uploaded whole; its description is in the storage."""

    __tablename__ = "code"
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    num_files: Mapped[int]
    size_bytes: Mapped[int]
    manifest_key: Mapped[str]
    """Where in the storage its description is, with the place of each part."""
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]
    """When it was last uploaded or submitted; code that no job has is deleted a while after."""


class CodePackRow(Base):
    """One object of the storage: the parts of one request, or a description of code."""

    __tablename__ = "code_packs"
    __table_args__ = (Index("ix_code_packs_owner", "owner"),)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    size_bytes: Mapped[int]
    used_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]
    """Set while the object is being deleted: its parts are gone from here."""


class CodePartRow(Base):
    """Where a part is: one owner's, whom alone its hash says that it is there."""

    __tablename__ = "code_parts"
    __table_args__ = (Index("ix_code_parts_pack", "pack"),)
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    pack: Mapped[str] = mapped_column(String(255), ForeignKey("code_packs.key", ondelete="CASCADE"))
    start: Mapped[int]
    size_bytes: Mapped[int]


class CodeUseRow(Base):
    """Which packs hold parts of some code."""

    __tablename__ = "code_uses"
    __table_args__ = (
        ForeignKeyConstraint(["owner", "code"], ["code.owner", "code.id"], ondelete="CASCADE"),
        Index("ix_code_uses_pack", "pack"),
    )
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    pack: Mapped[str] = mapped_column(String(255), ForeignKey("code_packs.key"), primary_key=True)
