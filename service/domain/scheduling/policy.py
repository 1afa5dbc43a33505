"""The scheduling policy: which jobs start where, why the others wait, who makes room, who grows.

A gang starts whole or not at all; an elastic one also with fewer workers, from its least number
on. Jobs are considered in the order of `order`: by priority, then by the work that they have left.
A job that finds no free slots has running jobs leave that come clearly behind it (`eviction`).

A job that can't start yet reserves all that it could ever use: on each node, as many of its
workers' bundles as fit there when the node is empty are set aside, and jobs behind it may take only
the rest. So a small job never delays a large one that came first, yet passes it on capacity that
the large one has no use for, such as nodes of another kind. A job that would leave its slots when
it is asked to passes also on reserved ones, while the other has not waited for long: it can be
pushed out again.

Running groups get more slots at both ends of the queue. Before the queue: a group that lost slots
and lacks workers to train on. It was given its slots before any job that waits now, it holds the
rest of them, and it stands by for no more than half a minute. So it gets any free slot, also one
that a waiting job has reserved, and slots that it can't have yet are set aside as for a job ahead
of all others. After the queue: an elastic group that trains below its size gets slots that no
waiting job has reserved, by priority, then first come first served. Here jobs that back off reserve
slots, too: a job that starts before them ends some day, but a group keeps what it has grown into.

A job that is held, that the limits of its queue keep back (`limits`), that waits for others to end,
or whose array runs as many jobs as it may, reserves nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ray_workers.shared.contracts import Slice
from service.config.node_types import LABEL
from service.domain.scheduling import eviction, order, shares
from service.domain.scheduling.dependencies import ArrayLimit, Dependency, waits_for
from service.domain.scheduling.eviction import RunningJob as RunningJob
from service.domain.scheduling.limits import HELD, QueueLimits, held_message
from service.domain.scheduling.obstacles import Obstacles, jobs
from service.domain.scheduling.obstacles import Reason as Reason
from service.domain.scheduling.pools import Offer, Pool
from service.domain.scheduling.queues import DEFAULT, Queue
from service.domain.scheduling.slots import EPSILON as EPSILON
from service.domain.scheduling.slots import Holder as Holder
from service.domain.scheduling.slots import Kind, amount_of, bundle_of, count, needs, workers
from service.domain.scheduling.slots import Node as Node
from service.domain.scheduling.slots import Request as Request
from service.domain.scheduling.slots import fits as fits
from service.domain.scheduling.slots import held_on as held_on
from service.domain.scheduling.slots import offered as offered
from service.domain.scheduling.slots import request_of as request_of


@dataclass(frozen=True)
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
    """Since it was submitted, without the time in which it ran."""
    yields: bool = False
    """It saves its state when it is asked to leave its slots, and goes on from there."""
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
    """Workers without which the group can't train on; it stands by for them."""
    queue: str = DEFAULT
    owner: str = "default"

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
    queues: tuple[Queue, ...] = ()
    used_s: Mapping[shares.Account, float] = field(default_factory=dict)
    """Cluster-seconds that users have used of late, by queue and user."""
    running_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs with slots, by array."""
    to_come: tuple[Node, ...] = ()
    """Nodes that can't be used yet and may come: those that an autoscaler may add, and those that
    are about to be accepted."""


@dataclass(frozen=True)
class Start:
    job_id: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Wait:
    job_id: str
    reason: Reason
    position: int | None
    """Place in the queue, 1 being next; None of a job that is held."""
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


@dataclass(frozen=True)
class Preempt:
    """Ask a running job to save its state and leave its slots."""

    job_id: str
    reason: Reason
    because_of: str
    """The job that needs the slots."""


@dataclass(frozen=True)
class Stay:
    """A group that could use more slots gets none now."""

    job_id: str
    reason: Reason
    blocked_by: tuple[str, ...] = ()


Decision = Start | Wait | Impossible | Grow | Stay | Preempt

MAX_PREEMPTED = 100
"""Jobs that one plan asks to leave: those that are still in the way are asked by the next."""


def can_ever_fit(request: Request, nodes: Sequence[Node]) -> Reason | None:
    """Why the accepted nodes could not run the gang even if they were empty; None if they could."""
    totals = [node.total for node in nodes if node.accepted]
    most = sum(fits(request.bundle, total) for total in totals)
    if most >= request.least:
        return None
    if most:
        return Reason(
            "unsatisfiable",
            f"{needs(request)}, but the whole cluster has room for {most} at once",
        )
    lacking = [
        (name, amount, max((total.get(name, 0.0) for total in totals), default=0.0))
        for name, amount in request.bundle.items()
    ]
    missing = [entry for entry in lacking if entry[2] + EPSILON < entry[1]]
    if not missing:
        return Reason(
            "unsatisfiable",
            f"{needs(request)}, and no single node of the cluster has all of it",
        )
    name, amount, best = missing[0]
    if name.startswith(LABEL):
        label = name.removeprefix(LABEL)
        return Reason("unsatisfiable", f"no node of the cluster has the label {label}")
    if name.startswith("accelerator_type:"):
        kind = name.removeprefix("accelerator_type:")
        return Reason("unsatisfiable", f"no node of the cluster has the accelerator {kind}")
    return Reason(
        "unsatisfiable",
        f"each worker needs {amount_of(name, amount)}, but the largest node has "
        f"{amount_of(name, best) if best else f'no {name}'}",
    )


def lacking_resource(request: Request, nodes: Sequence[Node]) -> str | None:
    """The resource of which no accepted node has enough for one worker; None if only the number of
    workers is too large."""
    totals = [node.total for node in nodes if node.accepted]
    for name, amount in request.bundle.items():
        if all(total.get(name, 0.0) + EPSILON < amount for total in totals):
            return name
    return None


def plan(snapshot: Snapshot, now: datetime) -> list[Decision]:
    """One decision for each waiting job, in the order of the queue, those that are held at its end;
    then one for each group that could grow, and one for each job that is to leave its slots."""
    accepted = sorted((node for node in snapshot.nodes if node.accepted), key=lambda n: n.id)
    ranks = _ranks(snapshot, order.total_of(node.total for node in accepted))
    held = [job for job in snapshot.queue if job.held is not None]
    queue = [job for job in snapshot.queue if job.held is None]
    queue.sort(key=lambda job: ranks[job.job_id].key)
    round_ = _Round(accepted if snapshot.connected else (), snapshot, ranks, now)
    kept = [Wait(j.job_id, Reason(HELD, held_message(j.held or "", j.job_id)), None) for j in held]
    obstacle = _nothing_starts(snapshot, accepted)
    standing_by = [round_.serve(group) for group in snapshot.growing if group.lacking]
    if obstacle is not None:
        waits = [
            _waits_for_jobs(job, place) or Wait(job.job_id, obstacle, place)
            for place, job in enumerate(queue, 1)
        ]
        others = [Stay(g.job_id, obstacle) for g in snapshot.growing if not g.lacking]
        return [*waits, *kept, *standing_by, *others]
    decisions: list[Decision] = []
    position = 0
    for job in queue:
        decision = round_.decide(job, position + 1)
        position += isinstance(decision, Wait)
        decisions.append(decision)
    round_.end_queue()
    groups = sorted(snapshot.growing, key=lambda group: (-group.priority, group.seq))
    grown = [round_.grow(group) for group in groups if not group.lacking]
    return [*decisions, *kept, *standing_by, *grown, *round_.preempted]


def _ranks(snapshot: Snapshot, total: Mapping[str, float]) -> dict[str, order.Rank]:
    """By job, of those that wait and those that run. Jobs count against a quota by priority, of
    equal ones those first that run; those that can't start now do not count."""
    there: list[WaitingJob | RunningJob] = [*snapshot.running, *snapshot.queue]
    there.sort(key=lambda j: (-j.priority, isinstance(j, WaitingJob), j.place, j.seq))
    in_arrays = Counter(snapshot.running_of_arrays)
    claims = []
    for job in there:
        if isinstance(job, WaitingJob) and not _may_claim(job, in_arrays):
            continue
        least = job.request.least
        claims.append(shares.Claim(job.job_id, job.queue, job.request.bundle, least))
    guaranteed = shares.within_quota(snapshot.queues, claims)
    # An account whose jobs are all held could not use its share.
    active = {
        (job.queue, job.owner)
        for job in there
        if not (isinstance(job, WaitingJob) and (job.held or job.after))
    }
    standings = shares.Standings(snapshot.queues, snapshot.used_s, active)
    return {
        job.job_id: order.Rank(
            turn=standings.turn(job.queue, is_within_quota=job.job_id in guaranteed),
            priority=job.priority,
            place=job.place,
            user_is_ahead=standings.user_is_ahead(job.queue, job.owner),
            work=order.work_left(job.left_s, order.share_of(job.request, total), job.waited_s),
            seq=job.seq,
        )
        for job in there
    }


def _may_claim(job: WaitingJob, in_arrays: Counter[str]) -> bool:
    """Whether the job could start if there were slots. in_arrays: members that count already."""
    if job.after or job.held or job.preparing or job.not_before:
        return False
    if job.array is not None:
        in_arrays[job.array.array_id] += 1
        return in_arrays[job.array.array_id] <= job.array.max_running
    return True


def _nothing_starts(snapshot: Snapshot, accepted: Sequence[Node]) -> Reason | None:
    if not snapshot.connected:
        return Reason("cluster_unavailable", "waits for the Ray cluster, which does not answer")
    may_come = bool(snapshot.to_come)
    if snapshot.nodes and not accepted and not may_come:
        return Reason("no_nodes", "waits for a node: every node of the cluster is refused")
    if not accepted and not may_come:
        return Reason("no_nodes", "waits for a node: the cluster has none yet")
    if snapshot.storage_problem is not None:
        return Reason("storage_full", f"waits for room: {snapshot.storage_problem}")
    return None


def _waits_for_jobs(job: WaitingJob, position: int) -> Wait | None:
    """None if all have ended that it waits for."""
    if not job.after:
        return None
    reason = Reason("waiting_for_jobs", waits_for(job.after))
    return Wait(job.job_id, reason, position, tuple(one.id for one in job.after))


class _Round:
    """The slots that are left while one plan is made."""

    def __init__(
        self,
        nodes: Sequence[Node],
        snapshot: Snapshot,
        ranks: Mapping[str, order.Rank],
        now: datetime,
    ) -> None:
        self._nodes = nodes
        self._ranks = ranks
        self._running = eviction.cheapest_first(snapshot.running, ranks)
        self._leaving = {job.job_id: job for job in self._running if job.is_leaving}
        self._free = Pool((node.id, node.available_to_us) for node in nodes)
        self._open = Offer(nodes)
        """Without what is reserved by blocked jobs ahead."""
        self._passable = Offer(nodes)
        """Without what is reserved by those of them that have waited for long."""
        self._offers = (self._open, self._passable)
        for offer in self._offers:
            for running in self._leaving.values():
                offer.expect(running.request.bundle, running.slices)
        lacking = [(group, group.lacking) for group in snapshot.growing]
        self._limits = QueueLimits(snapshot.queues, snapshot.holders, lacking)
        self._obstacles = Obstacles(nodes, snapshot.holders, self._free)
        self._to_come = snapshot.to_come
        self._impossible: dict[tuple[Kind, int], Reason | None] = {}
        self._too_large: dict[tuple[Kind, int], Reason | None] = {}
        self._unevictable: dict[tuple[Kind, int, bool], order.Rank] = {}
        """Ranks at which not enough may be asked for such a gang."""
        self._backing_off: list[WaitingJob] = []
        self._now = now
        self.preempted: list[Preempt] = []
        self._running_of_arrays = Counter(snapshot.running_of_arrays)

    def serve(self, group: Growing) -> Decision:
        """Give a group that stands by all that it lacks, of any free slots."""
        request, lacking = group.request, group.lacking
        slices = self._free.pack(request, lacking)
        if slices is not None:
            return self._grow(group, slices)
        sentence = f"stands by for {workers(lacking)} of {bundle_of(request)}"
        reason, ahead = self._obstacles.why(sentence, group.job_id, request, lacking)
        self._set_aside(group.job_id, request, lacking)
        return Stay(group.job_id, reason, ahead)

    def decide(self, job: WaitingJob, position: int) -> Decision:
        if (waits := _waits_for_jobs(job, position)) is not None:
            return waits
        request = job.request
        if (impossible := self._never_fits(request)) is not None:
            return Impossible(job.job_id, impossible)
        if job.not_before is not None and job.not_before > self._now:
            self._backing_off.append(job)
            message = f"is tried again at {job.not_before:%H:%M:%S} UTC, its last attempt failed"
            return Wait(job.job_id, Reason("backing_off", message), position)
        if job.array is not None and self._is_full(job.array):
            return Wait(job.job_id, Reason("array_limit", job.array.sentence), position)
        if job.preparing is not None:
            self._backing_off.append(job)
            reason = Reason("preparing_environment", job.preparing)
            return Wait(job.job_id, reason, position)
        room = self._limits.room(job, request.least)
        if room.workers < request.least:
            self._limits.keep_place(job, request.least, room)
            reason = Reason(room.code, f"{needs(request)}; {room.message}")
            return Wait(job.job_id, reason, position, room.holders)
        most = min(request.num_workers, room.workers)
        offer = self._passable if job.yields else self._open
        slices = offer.now.pack_most(request, most)
        if slices is not None:
            self._take(job.job_id, request, slices)
            self._limits.take(job, count(slices))
            self._count_in_array(job)
            return Start(job.job_id, slices)
        self._limits.keep_place(job, most)
        if offer.soon.room(request) >= request.least or self._evict(job, offer):
            self._count_in_array(job)
            return self._promise(job, offer, most, position)
        reason, ahead = self._obstacles.why(needs(request), job.job_id, request, request.least)
        if self._to_come and (lacks := self._lacks_nodes(request)) is not None:
            reason, ahead = lacks, ()
        self._set_aside(job.job_id, request, most, job.waited_s > order.LONGEST_WAIT_S)
        return Wait(job.job_id, reason, position, ahead)

    def _never_fits(self, request: Request) -> Reason | None:
        kind = request.kind, request.least
        if kind not in self._impossible:
            self._impossible[kind] = can_ever_fit(request, [*self._nodes, *self._to_come])
        return self._impossible[kind]

    def _lacks_nodes(self, request: Request) -> Reason | None:
        """Why the nodes that are there could not run the gang even if they were empty."""
        kind = request.kind, request.least
        if kind not in self._too_large:
            reason = can_ever_fit(request, self._nodes)
            if reason is not None:
                why = reason.message if self._nodes else "there is none that it could use"
                message = f"{needs(request)}, and waits for nodes: {why}"
                reason = Reason("waiting_for_nodes", message)
            self._too_large[kind] = reason
        return self._too_large[kind]

    def _evict(self, job: WaitingJob, offer: Offer) -> bool:
        """Have running jobs leave slots for this one; False where not enough may be asked."""
        request, rank = job.request, self._ranks[job.job_id]
        kind = request.kind, request.least, job.yields
        tried = self._unevictable.get(kind)
        is_weaker = tried is not None and rank.may_less(tried)
        if is_weaker or len(self.preempted) >= MAX_PREEMPTED:
            return False
        candidates = (
            running
            for running in self._running
            if running.job_id not in self._leaving
            and eviction.may_evict(rank, running, self._ranks[running.job_id])
        )
        leaving = eviction.victims(request, offer.soon, candidates)
        if not leaving:
            self._unevictable[kind] = rank
            return False
        for running in leaving:
            self._preempt(running, job)
        return True

    def _preempt(self, running: RunningJob, coming: WaitingJob) -> None:
        self._leaving[running.job_id] = running
        self._unevictable.clear()
        for offer in self._offers:
            offer.expect(running.request.bundle, running.slices)
        why = eviction.because(self._ranks[coming.job_id], self._ranks[running.job_id])
        message = f"leaves its slots to job {coming.job_id}, which {why}"
        self.preempted.append(Preempt(running.job_id, Reason("preempted", message), coming.job_id))

    def _promise(self, job: WaitingJob, offer: Offer, most: int, position: int) -> Wait:
        """Keep slots of which some are about to be left."""
        slices = offer.soon.pack_most(job.request, most)
        assert slices is not None, "the slots of those that leave are enough"
        for each in self._offers:
            each.promise(job.request.bundle, slices)
        self._obstacles.block(job.job_id, job.request)
        there = {part.node_id for part in slices}
        leaving = tuple(
            running.job_id
            for running in self._leaving.values()
            if any(part.node_id in there for part in running.slices)
        )
        verb = "makes" if len(leaving) == 1 else "make"
        message = f"{needs(job.request)}; {jobs(leaving)} {verb} room for it"
        return Wait(job.job_id, Reason("room_is_made", message), position, leaving, slices)

    def _is_full(self, array: ArrayLimit) -> bool:
        return self._running_of_arrays[array.array_id] >= array.max_running

    def _count_in_array(self, job: WaitingJob) -> None:
        if job.array is not None:
            self._running_of_arrays[job.array.array_id] += 1

    def end_queue(self) -> None:
        """Set aside what jobs reserve that back off, before groups grow."""
        for job in self._backing_off:
            self._set_aside(job.job_id, job.request, job.request.num_workers)
            self._limits.keep_place(job, job.request.num_workers)

    def grow(self, group: Growing) -> Decision:
        """Give a group that trains the slots it can use and nobody has reserved."""
        request = group.request
        room = self._limits.room(group, 1)
        sentence = f"could use {workers(group.most)} more of {bundle_of(request)}"
        if not room.workers:
            reason = Reason(room.code, f"{sentence}; {room.message}")
            return Stay(group.job_id, reason, room.holders)
        most = min(group.most, room.workers)
        slices = self._open.now.pack_most(replace(request, min_workers=1), most)
        if slices is not None:
            self._limits.take(group, count(slices))
            return self._grow(group, slices)
        return Stay(group.job_id, *self._obstacles.why(sentence, group.job_id, request, 1))

    def _grow(self, group: Growing, slices: tuple[Slice, ...]) -> Grow:
        self._take(group.job_id, group.request, slices)
        return Grow(group.job_id, slices)

    def _take(self, job_id: str, request: Request, slices: tuple[Slice, ...]) -> None:
        for part in slices:
            self._free.add(part.node_id, request.bundle, -part.num_workers)
        for offer in self._offers:
            offer.take(request.bundle, slices)
        self._obstacles.hold(job_id, slices, request.bundle)

    def _set_aside(
        self, job_id: str, request: Request, most: int, is_impatient: bool = True
    ) -> None:
        self._obstacles.block(job_id, request)
        for offer in self._offers if is_impatient else (self._open,):
            offer.set_aside(request, most)
