"""The records of a plan: the snapshot that goes into it, and the decisions that come out."""

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
    """Number of its newest attempt, which a claim must still find."""
    priority: int
    seq: int
    """Order of submission."""
    request: Request
    not_before: datetime | None = None
    preparing: str | None = None
    """Set while its environment is not ready on the nodes where it would start: it takes no slot
    and reserves none."""
    left_s: float | None = None
    """Seconds that it has left once it runs; None where nobody knows."""
    waited_s: float = math.inf
    """Since it was submitted, without the time in which it ran, was held, waited for others to end
    or for its array."""
    yields: bool = False
    """It saves its state when it is asked to leave its slots, and goes on from there."""
    ends_within_s: float | None = None
    """Seconds of running after which it is ended, if not before."""
    queue: str = DEFAULT
    owner: str = "default"
    held: str | None = None
    """Name of who holds the job: it does not start."""
    place: int = 0
    """Among jobs of one priority a lower one goes first: see `models.JobRow.rank`."""
    after: tuple[Dependency, ...] = ()
    """Jobs and arrays that must end first; until then it takes no slot and reserves none."""
    array: ArrayLimit | None = None


@dataclass(frozen=True)
class Growing:
    """A group that could use more slots, and has no grant that it has not confirmed yet."""

    job_id: str
    attempt: int
    priority: int
    seq: int
    request: Request
    slices: tuple[Slice, ...]
    """The slots that it holds, which a grant must still find."""
    lacking: int = 0
    """Workers without which the group can't train on; it stands by for them, unless it `trains`."""
    queue: str = DEFAULT
    owner: str = "default"
    trains: bool = False
    """It trains on without those that it lacks, as gossip does."""

    @property
    def most(self) -> int:
        """Workers up to its full size."""
        return self.request.num_workers - count(self.slices)


@dataclass(frozen=True)
class Snapshot:
    queue: tuple[WaitingJob, ...]
    nodes: tuple[Node, ...]
    connected: bool
    holders: tuple[Holder, ...] = ()
    """Jobs that have slots, for the sentences only: `available_to_us` is without those slots."""
    storage_problem: str | None = None
    """Why nothing may start though there are slots: the storage is full."""
    growing: tuple[Growing, ...] = ()
    running: tuple[RunningJob, ...] = ()
    """Jobs that may be asked to leave their slots."""
    min_run_s: float = eviction.MIN_RUN_S
    """How long a job holds its slots before it is."""
    queues: tuple[Queue, ...] = ()
    used_s: Mapping[shares.Account, float] = field(default_factory=dict)
    """Cluster-seconds that users have used of late, by queue and user."""
    running_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs with slots, by array."""
    used_up: Mapping[str, str] = field(default_factory=dict)
    """By queue, why none of its jobs starts: its budget is used up."""
    topology: tuple[str, ...] = ()
    """Keys of the labels that name the levels of the topology, the widest first."""
    to_come: tuple[Node, ...] = ()
    """Nodes that can't be used yet and may come: those that an autoscaler may add, and those that
    are about to be accepted."""
    elastic: Mapping[str, ElasticJob] = field(default_factory=dict)
    """By job, those whose size is chosen by their speed: all save their state and go on from it."""


@dataclass(frozen=True)
class Start:
    job_id: str
    slices: tuple[Slice, ...]


@dataclass(slots=True, unsafe_hash=True)
class Wait:
    """Not frozen: there is one for each waiting job, to make a frozen one takes five times as long,
    and of many the reason is added when all else is decided."""

    job_id: str
    reason: Reason
    position: int | None
    """Place in the queue, 1 being next; None of a job that is held or has a request that raises an
    error."""
    blocked_by: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()
    """Slots that are kept for it until others have left them."""


@dataclass(frozen=True)
class Impossible:
    job_id: str
    reason: Reason


@dataclass(frozen=True)
class Grow:
    """Give a running group these slots in addition."""

    job_id: str
    slices: tuple[Slice, ...]
    batch_size: int | None = None
    """Global batch that it trains with then, where that may change."""


@dataclass(frozen=True)
class Preempt:
    """Ask a running job to save its state and leave its slots."""

    job_id: str
    reason: Reason
    because_of: str
    """The job that needs the slots."""


@dataclass(frozen=True)
class Shrink:
    """Ask a running group to give these slots back, and to go on with the others."""

    job_id: str
    slices: tuple[Slice, ...]
    reason: Reason
    because_of: str
    """The job that needs the slots."""
    batch_size: int | None = None
    """As of `Grow`."""


@dataclass(slots=True, unsafe_hash=True)
class Stay:
    """A group that could use more slots gets none now. As `Wait`, not frozen."""

    job_id: str
    reason: Reason
    blocked_by: tuple[str, ...] = ()


Decision = Start | Wait | Impossible | Grow | Stay | Preempt | Shrink
