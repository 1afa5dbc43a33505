"""Jobs: state, progress, use of slots and cost."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from dray.views.base import MetricValue, Reason, View


class JobState(StrEnum):
    """State of a job. The last three are final."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Progress(View):
    step: int
    total_steps: int | None = None
    epoch: int | None = None
    samples_per_s: float | None = None
    """Samples per second; null, like the times of the end, while the job is not RUNNING."""
    earliest_end_at: datetime | None = None
    latest_end_at: datetime | None = None
    """The job ends between these two times at its measured speeds. Both are null until enough steps
    have been measured, and for a job that reports no total number of steps."""


class Links(View):
    self: str
    metrics: str
    logs: str
    events: str
    artifacts: str
    ray_dashboard: str | None = None


class SlotSeconds(View):
    """Use of slots in slot-seconds; each second of each slot is counted in one class."""

    useful: float
    recomputed: float
    """Time of steps that were repeated because their first results were lost."""
    starting: float
    data_wait: float
    recovering: float
    checkpointing: float
    idle: float
    """Time without a known use."""
    unreported: float = 0.0
    """Time of a script that has reported no step, so that its use is unknown."""


class Goodput(View):
    """How a job used its slots, over all its attempts."""

    slot_seconds: SlotSeconds
    total: float
    """Sum of all classes: the time for which slots were held."""
    useful_share: float | None = None
    """Share of the total that was useful, 0 to 1; unset before slots are held, and while a script
    has reported no step."""


class Cost(View):
    """The cost of slots, divided into the same classes as their time in `Goodput`; the classes add
    up to the total."""

    currency: str
    total: float
    useful: float
    wasted: float
    unreported: float
    """Cost of time whose use is unknown, such as that of a script that has reported no step."""


class Job(View):
    id: str
    name: str
    owner: str
    project: str
    labels: dict[str, str]
    tags: list[str] = []
    """Words that users marked the job with, sorted."""
    state: JobState
    reason: Reason
    queue: str
    priority: int
    held_by: str | None = None
    """Name of the caller who holds the waiting job; a held job does not start."""
    spec: dict[str, Any]
    array_id: str | None = None
    """Id of the array that the job belongs to; unset, like `array_index`, for a job without an
    array."""
    array_index: int | None = None
    """Index of the job in its array, from 0."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    world_size: int
    """Number of workers that the job has or last had; while it waits, the requested number."""
    position: int | None = None
    """Position in the queue, from 1, as of the scheduler's last round; only while the job waits."""
    progress: Progress | None = None
    summary: dict[str, MetricValue]
    """The last value of each metric of rank 0."""
    warnings: list[Reason] = []
    """Problems that did not end the job, such as a loss that was not finite."""
    recoveries: int = 0
    """Number of times that the group lost a rank and recovered in place."""
    goodput: Goodput | None = None
    """Use of the slots; unset until an attempt has reported it."""
    cost: Cost | None = None
    """Cost of all attempts up to their newest reports; unset if slots have no prices."""
    created_at: datetime
    started_at: datetime | None = None
    """When the first attempt was launched."""
    first_step_at: datetime | None = None
    """When the first optimizer step of the job was reported, by the worker's clock; unset for a
    script that reports no steps."""
    finished_at: datetime | None = None
    links: Links


class JobPage(View):
    items: list[Job]
    next_cursor: str | None = None


class OtherJob(View):
    """A job that another job waits for."""

    id: str
    name: str
    state: JobState
    priority: int
    world_size: int
    """Number of workers that the job has or requests."""
