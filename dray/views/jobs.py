"""Views of jobs: state, progress, slot usage and cost."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from dray.views.base import MetricValue, Reason, View


class JobState(StrEnum):
    """State of a job. The last three states are final."""

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
    """Samples per second. Null, like the estimated end times, unless the job is RUNNING."""
    earliest_end_at: datetime | None = None
    latest_end_at: datetime | None = None
    """The job is expected to end between `earliest_end_at` and `latest_end_at`, according to the
    measured step times. Both times are null until enough steps have been measured, and if the job
    does not report a total number of steps."""


class Links(View):
    self: str
    metrics: str
    logs: str
    events: str
    artifacts: str
    ray_dashboard: str | None = None


class SlotSeconds(View):
    """Slot usage in slot-seconds. Each second of each slot counts in exactly one class."""

    useful: float
    recomputed: float
    """Time spent on repeating steps whose results were lost."""
    starting: float
    data_wait: float
    recovering: float
    checkpointing: float
    idle: float
    """Time that belongs to none of the other classes."""
    unreported: float = 0.0
    """Time that dray can't classify, because the script has reported no steps."""
    spare: float = 0.0
    """Time for which spares were ready to take the place of a lost worker."""


class Goodput(View):
    """How a job used its slots, summed over all attempts."""

    slot_seconds: SlotSeconds
    total: float
    """Sum of all classes, which is the time for which slots were held."""
    useful_share: float | None = None
    """Useful share of the total, from 0 to 1; unset before any slots are held, and while a script
    has reported no steps."""


class Cost(View):
    """The cost of slots, broken down by how their time was used (see `Goodput`). `total` is the sum
    of `useful`, `wasted` and `unreported`."""

    currency: str
    total: float
    useful: float
    wasted: float
    unreported: float
    """Cost of time that dray can't classify, because the script has reported no steps."""


class MemoryCopies(View):
    """The newest copy of a divided model's state that is complete in the memory of the workers
    (`checkpoint.in_memory`). If a worker is lost, the job continues from this step."""

    step: int
    """Number of optimizer steps after which the state was copied."""
    state_bytes: int
    """Size of the state: the sum of all workers' shares."""
    worker_bytes: int
    """Host memory for copies on the worker that needs the most."""


class Job(View):
    id: str
    name: str
    owner: str
    project: str
    labels: dict[str, str]
    tags: list[str] = []
    """Tags that users added to the job, sorted."""
    state: JobState
    reason: Reason
    queue: str
    priority: int
    held_by: str | None = None
    """Name of the user who put the waiting job on hold. A held job does not start."""
    begin_at: datetime | None = None
    """The time before which the job does not start; unset if it had passed at submission."""
    deadline: datetime | None = None
    """The time at which the job is cancelled if it has not ended."""
    reservation: str | None = None
    """The reservation that the job's document names."""
    max_runtime_s: int | None = None
    """Maximum total running time of all attempts."""
    max_runtime_from: Literal["job", "queue"] | None = None
    """Whether `max_runtime_s` is from the job's document, or the default of its queue."""
    spec: dict[str, Any]
    array_id: str | None = None
    """Id of the job's array. Unset, like `array_index`, if the job is not part of an array."""
    array_index: int | None = None
    """Index of the job in its array, starting at 0."""
    variant: str | None = None
    """The index of the job in its array and, for a trial, the parameters that differ between the
    trials, such as `#3 lr 0.01, width 32`. Unset if the job is not part of an array."""
    colour: int | None = None
    """Number of the colour in which the web page draws the job's curves, from 0 to 19; unset unless
    a user has chosen one."""
    schedule_id: str | None = None
    """Id of the schedule that submitted the job. Unset, like `scheduled_at`, for other jobs."""
    scheduled_at: datetime | None = None
    """The time of the schedule for which the job was submitted, with the schedule's offset from
    UTC."""
    attempt: int
    """Number of the latest attempt; 0 before the first attempt."""
    world_size: int
    """Number of workers that the job has or last had. While the job waits, this is the requested
    number of workers. Spares are not included."""
    spares: int = 0
    """Number of requested spares (`elastic.spares`)."""
    spares_ready: int = 0
    """Number of spares that can take the place of a lost worker now."""
    memory_copies: MemoryCopies | None = None
    """The newest complete copy of the state in the workers' memory. Unset while there is none, and
    while the job holds no slots."""
    position: int | None = None
    """Position in the queue as of the scheduler's last round, starting at 1; set only while the job
    waits."""
    progress: Progress | None = None
    summary: dict[str, MetricValue]
    """The last value of each metric of rank 0."""
    warnings: list[Reason] = []
    """Problems that did not end the job, such as a non-finite loss."""
    recoveries: int = 0
    """Number of times that the job lost a rank and recovered in place."""
    goodput: Goodput | None = None
    """Slot usage; unset until an attempt has reported it."""
    cost: Cost | None = None
    """Cost of all attempts up to their latest reports; unset if slots have no prices."""
    created_at: datetime
    started_at: datetime | None = None
    """When the first attempt was launched."""
    first_step_at: datetime | None = None
    """When the job's first optimizer step was reported, by the worker's clock; unset for a script
    that reports no steps."""
    finished_at: datetime | None = None
    values: dict[str, Any] = {}
    """Values of the requested `columns`, keyed by column; null for values that the job doesn't
    have. Empty unless columns were requested."""
    values_as_of: datetime | None = None
    """The time up to which the metrics in `values` cover the job's points. Set only if the job has
    not ended and a metric was requested."""
    links: Links

    @property
    def title(self) -> str:
        """The job's name and, if the job belongs to an array, its `variant`."""
        return f"{self.name} {self.variant}" if self.variant else self.name


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
