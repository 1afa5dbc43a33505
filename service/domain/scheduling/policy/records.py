"""The records of a plan: its input, the snapshot, and its output, the decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.elastic.sizing import ElasticJob
from service.domain.scheduling.placement.slots import Holder, Node, Request, count
from service.domain.scheduling.rules import eviction, shares
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.queues import DEFAULT, Queue


@dataclass(frozen=True, slots=True)
class WaitingJob:
    job_id: str
    attempt: int
    """Number of the job's newest attempt. A claim fails if this has changed."""
    priority: int
    seq: int
    """Order of submission."""
    request: Request
    not_before: datetime | None = None
    preparing: str | None = None
    """Set while the environment is not ready on the nodes where the job would start. The job then
    takes and reserves no slots."""
    left_s: float | None = None
    """Seconds that the job has left once it runs; None if unknown."""
    waited_s: float = math.inf
    """Seconds since the job was submitted, without the time in which it ran, was held, or waited
    for other jobs to end or for its array."""
    yields: bool = False
    """Whether the job saves its state when asked to leave its slots, and resumes from it."""
    ends_within_s: float | None = None
    """Seconds of running after which the job is ended at the latest."""
    queue: str = DEFAULT
    owner: str = "default"
    held: str | None = None
    """Name of the user who holds the job. A held job does not start."""
    place: int = 0
    """Lower values go first among jobs of one priority: see `models.JobRow.rank`."""
    after: tuple[Dependency, ...] = ()
    """Jobs and arrays that must end first. Until then, the job takes and reserves no slots."""
    array: ArrayLimit | None = None


@dataclass(frozen=True)
class Growing:
    """A group that could use more slots and has confirmed all its grants."""

    job_id: str
    attempt: int
    priority: int
    seq: int
    request: Request
    slices: tuple[Slice, ...]
    """The slots that the group holds. A grant fails if these have changed."""
    lacking: int = 0
    """Number of missing workers for which the group waits, unless it `trains` without them."""
    queue: str = DEFAULT
    owner: str = "default"
    trains: bool = False
    """Whether the group goes on without the missing workers, as gossip does."""

    @property
    def most(self) -> int:
        """Number of workers up to the full size."""
        return self.request.num_workers - count(self.slices)


@dataclass(frozen=True)
class Snapshot:
    queue: tuple[WaitingJob, ...]
    nodes: tuple[Node, ...]
    connected: bool
    holders: tuple[Holder, ...] = ()
    """Jobs that have slots, only for messages: `available_to_us` already excludes their slots."""
    storage_problem: str | None = None
    """Why no job may start although slots are free: the storage is full."""
    growing: tuple[Growing, ...] = ()
    running: tuple[RunningJob, ...] = ()
    """Jobs that may be asked to leave their slots."""
    min_run_s: float = eviction.MIN_RUN_S
    """Seconds for which a job holds its slots before it may be asked to leave."""
    queues: tuple[Queue, ...] = ()
    used_s: Mapping[shares.Account, float] = field(default_factory=dict)
    """Cluster-seconds that users have used recently, by queue and user."""
    running_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs with slots, by array."""
    used_up: Mapping[str, str] = field(default_factory=dict)
    """Why no job of a queue starts, by queue: the budget is used up."""
    topology: tuple[str, ...] = ()
    """Keys of the labels that name the levels of the topology, the widest first."""
    to_come: tuple[Node, ...] = ()
    """Nodes that an autoscaler may add, and nodes that are about to be accepted."""
    elastic: Mapping[str, ElasticJob] = field(default_factory=dict)
    """Jobs whose size is chosen by their speed, by job. All of them save and resume their state."""


@dataclass(frozen=True)
class Start:
    job_id: str
    slices: tuple[Slice, ...]


@dataclass(slots=True, unsafe_hash=True)
class Wait:
    """A waiting job does not start. Not frozen: each waiting job has a `Wait`, a frozen one takes
    five times as long to create, and many get their reason last."""

    job_id: str
    reason: Reason
    position: int | None
    """Position in the queue from 1; None if the job is held or its request raises an error."""
    blocked_by: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()
    """Slots that are kept for the job until other jobs have left them."""


@dataclass(frozen=True)
class Impossible:
    job_id: str
    reason: Reason


@dataclass(frozen=True)
class Grow:
    """Give a running group these additional slots."""

    job_id: str
    slices: tuple[Slice, ...]
    batch_size: int | None = None
    """Global batch of the grown group; None if the batch is fixed."""


@dataclass(frozen=True)
class Preempt:
    """Ask a running job to save its state and leave its slots."""

    job_id: str
    reason: Reason
    because_of: str
    """The job that needs the slots."""


@dataclass(frozen=True)
class Shrink:
    """Ask a running group to release these slots and go on with the others."""

    job_id: str
    slices: tuple[Slice, ...]
    reason: Reason
    because_of: str
    """The job that needs the slots."""
    batch_size: int | None = None
    """Global batch of the shrunk group; None if the batch is fixed."""


@dataclass(slots=True, unsafe_hash=True)
class Stay:
    """A group that could use more slots gets none now. Not frozen, for the reasons of `Wait`."""

    job_id: str
    reason: Reason
    blocked_by: tuple[str, ...] = ()


Decision = Start | Wait | Impossible | Grow | Stay | Preempt | Shrink
