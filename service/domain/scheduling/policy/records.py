"""The input of a plan (the snapshot) and its output (the decisions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic.sizing import ElasticJob
from service.domain.scheduling.placement.slots import Holder, Node, Request, count
from service.domain.scheduling.rules import eviction, shares
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.queues import DEFAULT, Queue
from service.domain.scheduling.rules.reservations import Reservation


@dataclass(frozen=True, slots=True)
class WaitingJob:
    job_id: str
    attempt: int
    """Number of the job's latest attempt. A claim fails if this number has changed."""
    priority: int
    seq: int
    """Order of submission."""
    request: Request
    not_before: datetime | None = None
    preparing: str | None = None
    """A message that is set while the environment is not ready on the nodes where the job would
    start. As long as the message is set, the job neither takes nor reserves slots."""
    left_s: float | None = None
    """Remaining runtime in seconds once the job has started; None if unknown."""
    guess_s: float | None = None
    """A rough estimate of the remaining runtime, used for the order if `left_s` is None. Not set
    for a job that releases its slots on request, because running it shows how long it takes."""
    waited_s: float = 0.0
    """Seconds since the job was submitted, excluding the time in which it ran, was held, or waited
    for its begin time, for its array, or for the end of other jobs."""
    yields: bool = False
    """Whether the job saves its state when asked to release its slots, and later resumes from this
    state."""
    ends_within_s: float | None = None
    """Maximum runtime in seconds, if the job started now."""
    ends_by: datetime | None = None
    """The deadline, which `ends_within_s` includes."""
    queue: str = DEFAULT
    owner: str = "default"
    held: str | None = None
    """Name of the user who put the job on hold. A held job does not start."""
    place: int = 0
    """Among jobs of the same priority, lower values come first: see `models.JobRow.rank`."""
    after: tuple[Dependency, ...] = ()
    """Jobs and arrays that must end before the job starts. Until these jobs and arrays end, the job
    neither takes nor reserves slots."""
    array: ArrayLimit | None = None
    start_by: datetime | None = None
    """The time at which the job is cancelled if it has not started, because of its deadline."""
    begins_at: datetime | None = None
    """The time, in the future, before which the job neither takes nor reserves slots."""
    project: str = "default"
    reservation: str | None = None
    """The reservation that the job's document names."""
    not_yet: Reason | None = None
    """Set while a plan is made, if the reservation that the job names doesn't let it start. The job
    then neither takes nor reserves slots."""


@dataclass(frozen=True)
class Growing:
    """A group that could use more slots and has confirmed all its earlier grants."""

    job_id: str
    attempt: int
    priority: int
    seq: int
    request: Request
    slices: tuple[Slice, ...]
    """The slots that the group holds. A grant fails if the group's slots have changed."""
    lacking: int = 0
    """Number of missing workers. The group waits for these workers unless `trains` is set."""
    queue: str = DEFAULT
    owner: str = "default"
    trains: bool = False
    """Whether the group continues without the missing workers, as with gossip."""

    @property
    def most(self) -> int:
        """Number of workers that the group could add to reach its full size."""
        return self.request.num_workers - count(self.slices)


@dataclass(frozen=True)
class Snapshot:
    queue: tuple[WaitingJob, ...]
    nodes: tuple[Node, ...]
    connected: bool
    holders: tuple[Holder, ...] = ()
    """Jobs that hold slots, which `available_to_us` already excludes."""
    storage_problem: str | None = None
    """Message that is set if the storage is full. No job can then start, even if slots are free."""
    growing: tuple[Growing, ...] = ()
    running: tuple[RunningJob, ...] = ()
    """Running jobs that can be asked to release their slots, or have been asked."""
    slots_lag: bool = False
    """Whether nodes might still show slots as taken that jobs have just released. In this case, no
    job is asked to release its slots."""
    min_run_s: float = eviction.MIN_RUN_S
    """Minimum time in seconds that a job holds its slots before it can be asked to release them."""
    queues: tuple[Queue, ...] = ()
    used_s: Mapping[shares.Account, float] = field(default_factory=dict)
    """Recent usage in cluster-seconds, by queue and user."""
    running_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs that hold slots, keyed by array."""
    used_up: Mapping[str, str] = field(default_factory=dict)
    """For each queue whose budget is used up, the reason why its jobs do not start."""
    topology: tuple[str, ...] = ()
    """Label keys of the levels of the topology, from the widest to the narrowest."""
    to_come: tuple[Node, ...] = ()
    """Nodes that an autoscaler could add, and nodes that are about to be accepted."""
    elastic: Mapping[str, ElasticJob] = field(default_factory=dict)
    """Jobs whose size is chosen based on their speed, keyed by job id. All of these jobs can save
    and resume their state."""
    reservations: tuple[Reservation, ...] = ()
    """The reservations that have not ended."""
    leave_s: float = 0.0
    """Seconds before a reservation begins at which jobs are asked to leave its nodes."""

    def holding(self) -> list[eviction.RunningJob]:
        """Return the running jobs and the jobs that have ended but not yet released their slots."""
        there = {job.job_id for job in self.running}
        over = [eviction.leftover(each) for each in self.holders if each.job_id not in there]
        return [*self.running, *over]


@dataclass(frozen=True)
class Start:
    job_id: str
    slices: tuple[Slice, ...]


@dataclass(slots=True, unsafe_hash=True)
class Wait:
    """Don't start a waiting job yet. The class is not frozen, because there is a `Wait` for every
    waiting job, creating a frozen instance takes five times as long, and many instances get their
    reason only at the end of the plan."""

    job_id: str
    reason: Reason
    position: int | None
    """Position in the queue, starting at 1; None if the job is held or its request raises an
    error."""
    blocked_by: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()
    """Slots that are kept for the job while other jobs are releasing them."""
    reserved: tuple[Slice, ...] = ()
    """Slots on which the job will start once running jobs have ended. Only the first job that can't
    start has a reservation."""


@dataclass(frozen=True)
class Impossible:
    job_id: str
    reason: Reason


@dataclass(frozen=True)
class Grow:
    """Give these additional slots to a running group."""

    job_id: str
    slices: tuple[Slice, ...]
    batch_size: int | None = None
    """Global batch size of the larger group; None if the size is fixed."""


@dataclass(frozen=True)
class Preempt:
    """Ask a running job to save its state and release its slots."""

    job_id: str
    reason: Reason
    because_of: str
    """The job that needs the slots, or the job itself."""
    ends: bool = False
    """Whether the job is cancelled."""


@dataclass(frozen=True)
class Shrink:
    """Ask a running group to release these slots and continue with its other slots."""

    job_id: str
    slices: tuple[Slice, ...]
    reason: Reason
    because_of: str
    """The job that needs the slots."""
    batch_size: int | None = None
    """Global batch size of the smaller group; None if the size is fixed."""


@dataclass(slots=True, unsafe_hash=True)
class Stay:
    """A group that could use more slots gets none in this plan. The class is not frozen, for the
    same reasons as `Wait`."""

    job_id: str
    reason: Reason
    blocked_by: tuple[str, ...] = ()


Decision = Start | Wait | Impossible | Grow | Stay | Preempt | Shrink
