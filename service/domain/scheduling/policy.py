"""The scheduling policy: which jobs start where, why the others wait, who makes room, who grows.

A gang starts whole or not at all; an elastic one also with fewer workers, from its least number
on. Jobs are considered in the order of `order`: by priority, then by the work that they have left.
A job that finds no free slots has running jobs leave that come clearly behind it (`eviction`).

A job that can't start yet reserves all that it could ever use: on each node, as many of its
workers' bundles as fit there when the node is empty are set aside, and jobs behind it may take only
the rest. So a small job never delays a large one that came first, yet passes it on capacity that
the large one has no use for, such as nodes of another kind. A job that would leave its slots when
it is asked to passes also on reserved ones, while the other has not waited for long: it can be
pushed out again. So does one whose running time is limited, if it surely ends before the other can
start (`backfill`).

Elastic jobs that report how long their steps take get the size at which the cluster gains most by
them (`sizing`): those that run on other sizes grow, give slots back, or leave and resume.

Running groups get more slots at both ends of the queue. Before the queue: a group that lost slots
and lacks workers to train on. It was given its slots before any job that waits now, it holds the
rest of them, and it stands by for no more than half a minute. So it gets any free slot, also one
that a waiting job has reserved, and slots that it can't have yet are set aside as for a job ahead
of all others. After the queue: an elastic group that trains below its size gets slots that no
waiting job has reserved, by priority, then first come first served. Here jobs that back off reserve
slots, too: a job that starts before them ends some day, but a group keeps what it has grown into.

A job that backs off reserves nothing before the queue has been served, unless it is tried again
soon: it was not at fault, as one whose node was lost, and keeps its place.

A job that is held, that the limits of its queue keep back (`limits`), that waits for others to end,
or whose array runs as many jobs as it may, reserves nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ray_workers.shared.contracts import Slice
from service.config.node_types import LABEL
from service.domain.scheduling import eviction, order, shares, sizing
from service.domain.scheduling.backfill import Backfill
from service.domain.scheduling.dependencies import ArrayLimit, Dependency, waits_for
from service.domain.scheduling.eviction import RunningJob as RunningJob
from service.domain.scheduling.gangs import Gang, Gangs, WorkerKind
from service.domain.scheduling.limits import HELD, QueueLimits, held_message
from service.domain.scheduling.obstacles import Obstacles, jobs
from service.domain.scheduling.obstacles import Reason as Reason
from service.domain.scheduling.pools import Offer, Pool, Stock, When
from service.domain.scheduling.queues import DEFAULT, Queue
from service.domain.scheduling.sizing import ElasticJob
from service.domain.scheduling.slots import EPSILON as EPSILON
from service.domain.scheduling.slots import (
    WHOLE_GPUS,
    amount_of,
    count,
    is_part_of_gpu,
    needs,
    workers,
)
from service.domain.scheduling.slots import Holder as Holder
from service.domain.scheduling.slots import Node as Node
from service.domain.scheduling.slots import Request as Request
from service.domain.scheduling.slots import fits as fits
from service.domain.scheduling.slots import held_by_node as held_by_node
from service.domain.scheduling.slots import held_on as held_on
from service.domain.scheduling.slots import offered as offered
from service.domain.scheduling.slots import request_of as request_of
from service.domain.scheduling.targets import ElasticClaim, Standing, targets
from service.domain.scheduling.topology import Topology, largest, name_of


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
    """Workers without which the group can't train on; it stands by for them."""
    queue: str = DEFAULT
    owner: str = "default"

    @property
    def most(self) -> int:
        """Workers up to its full size."""
        return self.request.num_workers - count(self.slices)

    @property
    def node_ids(self) -> list[str]:
        return [part.node_id for part in self.slices]


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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True)
class Stay:
    """A group that could use more slots gets none now."""

    job_id: str
    reason: Reason
    blocked_by: tuple[str, ...] = ()


Decision = Start | Wait | Impossible | Grow | Stay | Preempt | Shrink

SOON_S = 15.0
"""A job that backs off for no longer keeps its place: it was not at fault, or not often."""
MAX_PREEMPTED = 100
"""Jobs that one plan asks for slots: those that are still in the way are asked by the next."""


def can_ever_fit(
    request: Request, nodes: Sequence[Node], topology: Topology | None = None
) -> Reason | None:
    """Why the accepted nodes could not run the gang even if they were empty; None if they could.
    topology: of these nodes, and perhaps of others."""
    usable = [node for node in nodes if node.accepted]
    most = 0
    for node in usable:
        most += fits(request.bundle, node.total)
        if most >= request.least:
            break
    if most >= request.least:
        if request.required_level is None:
            return None
        sizes = {node.id: fits(request.bundle, node.total) for node in usable}
        return _why_never_together(request, topology or Topology((), usable), sizes)
    if most:
        return _unsatisfiable(
            f"{needs(request)}, but the whole cluster has room for {most} at once"
            + (", each on another GPU" if is_part_of_gpu(request.bundle) else ""),
        )
    totals = [node.total for node in usable]
    lacking = [
        (name, amount, max((total.get(name, 0.0) for total in totals), default=0.0))
        for name, amount in request.bundle.items()
    ]
    missing = [entry for entry in lacking if entry[2] + EPSILON < entry[1]]
    if not missing:
        return _unsatisfiable(f"{needs(request)}, and no single node of the cluster has all of it")
    name, amount, best = missing[0]
    if name.startswith(LABEL):
        label = name.removeprefix(LABEL)
        return _unsatisfiable(f"no node of the cluster has the label {label}")
    if name.startswith("accelerator_type:"):
        kind = name.removeprefix("accelerator_type:")
        return _unsatisfiable(f"no node of the cluster has the accelerator {kind}")
    return _unsatisfiable(
        f"each worker needs {amount_of(name, amount)}, but the largest node has "
        f"{amount_of(name, best) if best else f'no {name}'}",
    )


def _why_never_together(
    request: Request, topology: Topology, sizes: Mapping[str, int]
) -> Reason | None:
    """Why no domain of the required level could hold the gang; sizes: by node, its room."""
    level = request.required_level
    if level is None:
        return None
    if (no_level := why_no_level(request, topology)) is not None:
        return no_level
    rooms = topology.rooms(sizes, level)
    place = largest(rooms)
    if rooms[place] >= request.least:
        return None
    return _unsatisfiable(
        f"{needs(request)}, but the largest {level}, {name_of(place)}, has room for "
        f"{rooms[place]} at once"
    )


def why_no_level(request: Request, topology: Topology) -> Reason | None:
    """Why the required level is none of the topology; None if it is, or none is required."""
    level = request.required_level
    if level is None or topology.has(level):
        return None
    known = ", ".join(topology.levels)
    return _unsatisfiable(
        f"{needs(request)}, but the topology (DRAY_TOPOLOGY) has no level {level!r}, only: {known}"
    )


def _unsatisfiable(message: str) -> Reason:
    return Reason("unsatisfiable", message)


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
    gangs = Gangs(order.total_of(node.total for node in accepted))
    of_queue = [gangs.of(job.request) for job in snapshot.queue]
    for group in snapshot.growing:
        gangs.of(group.request)
    for job in snapshot.running:
        if job.job_id in snapshot.elastic:
            gangs.of(job.request)
    gangs.name_all(shares_gpus=any(WHOLE_GPUS in node.available_to_us for node in accepted))
    standings = _Standings(snapshot, gangs)
    ranks = [standings.rank(job, gang) for job, gang in zip(snapshot.queue, of_queue, strict=True)]
    running = {j.job_id: standings.rank(j, gangs.of(j.request)) for j in snapshot.running}
    if any(job.place for job in snapshot.queue) or any(job.place for job in snapshot.running):
        ranks, running = _at_the_front(snapshot, ranks, running)
    # Sorted are places, and no pairs: a collector of garbage goes through all that is made here.
    queue = [at for at, job in enumerate(snapshot.queue) if job.held is None]
    queue.sort(key=ranks.__getitem__)
    round_ = _Round(accepted if snapshot.connected else (), snapshot, gangs, running, now)
    held = [job for job in snapshot.queue if job.held is not None]
    kept = [Wait(j.job_id, Reason(HELD, held_message(j.held or "", j.job_id)), None) for j in held]
    obstacle = _nothing_starts(snapshot, accepted)
    if obstacle is None and snapshot.elastic:
        waiting = [(snapshot.queue[at], of_queue[at], ranks[at]) for at in queue]
        round_.choose_sizes(waiting)
    standing_by = [round_.serve(group) for group in snapshot.growing if group.lacking]
    if obstacle is not None:
        waits = [
            _waits_for_jobs(job, position) if job.after else Wait(job.job_id, obstacle, position)
            for position, job in enumerate([snapshot.queue[at] for at in queue], 1)
        ]
        others = [Stay(g.job_id, obstacle) for g in snapshot.growing if not g.lacking]
        return [*waits, *kept, *standing_by, *others]
    decisions: list[Decision] = []
    position = 1
    for at in queue:
        decision = round_.decide(snapshot.queue[at], of_queue[at], ranks[at], position)
        position += isinstance(decision, Wait)
        decisions.append(decision)
    round_.end_queue()
    groups = sorted(snapshot.growing, key=lambda group: (-group.priority, group.seq))
    grown = [round_.grow(group) for group in groups if not group.lacking]
    return [*decisions, *kept, *standing_by, *grown, *round_.asked]


class _Standings:
    """The places of jobs by the quotas and shares of their queues."""

    def __init__(self, snapshot: Snapshot, gangs: Gangs) -> None:
        self._guaranteed = _within_quota(snapshot, gangs)
        # An account whose jobs are all kept back could not use its share.
        active = {(job.queue, job.owner) for job in snapshot.running}
        used_up = snapshot.used_up
        active.update([(j.queue, j.owner) for j in snapshot.queue if not _is_kept_back(j, used_up)])
        self._standings = shares.Standings(snapshot.queues, snapshot.used_s, active)
        self._of_accounts: dict[shares.Account, tuple[shares.Turn, bool]] = {}

    def rank(self, job: WaitingJob | RunningJob, gang: Gang) -> order.Rank:
        account = job.queue, job.owner
        standing = self._of_accounts.get(account)
        if standing is None:
            turn = self._standings.turn(job.queue)
            standing = turn, self._standings.user_is_ahead(*account)
            self._of_accounts[account] = standing
        turn, user_is_ahead = standing
        return order.Rank(
            shares.Turn.QUOTA if job.job_id in self._guaranteed else turn,
            -job.priority,
            user_is_ahead,
            order.work_left(job.left_s, gang.weight, job.waited_s),
            job.seq,
            job.place,
        )


def _at_the_front(
    snapshot: Snapshot, ranks: Sequence[order.Rank], running: Mapping[str, order.Rank]
) -> tuple[list[order.Rank], dict[str, order.Rank]]:
    """The ranks with those of jobs that were moved to the front. A running one keeps its place, so
    that nobody whom it has passed pushes it out."""
    waiting = zip(snapshot.queue, ranks, strict=True)
    could = [(job.queue, r) for job, r in waiting if not _is_kept_back(job, snapshot.used_up)]
    fronts = order.Fronts(could)
    in_queue = zip(snapshot.queue, ranks, strict=True)
    there = {job.job_id: fronts.rank(job.queue, running[job.job_id]) for job in snapshot.running}
    return [fronts.rank(job.queue, rank) for job, rank in in_queue], there


def _within_quota(snapshot: Snapshot, gangs: Gangs) -> set[str]:
    """The jobs that their queues guarantee their slots. Jobs count against a quota by priority, of
    equal ones those first that run; those that can't start now do not count, also for a limit."""
    having = {queue.name for queue in snapshot.queues if queue.quota}
    if not having:
        return set()
    there: list[WaitingJob | RunningJob] = [
        *[job for job in snapshot.running if job.queue in having],
        *[job for job in snapshot.queue if job.queue in having or job.array is not None],
    ]
    there.sort(key=lambda j: (-j.priority, isinstance(j, WaitingJob), j.place, j.seq))
    in_arrays = Counter(snapshot.running_of_arrays)
    limits = _limits(snapshot, gangs)
    claims = []
    for job in there:
        gang = gangs.of(job.request)
        if isinstance(job, RunningJob) or (
            _may_claim(job, in_arrays, snapshot.used_up) and _takes_room(job, gang, limits)
        ):
            claims.append(shares.Claim(job.job_id, job.queue, gang.kind.counted, gang.least))
    return shares.within_quota(snapshot.queues, claims)


def _takes_room(job: WaitingJob, gang: Gang, limits: QueueLimits) -> bool:
    """Take what the limits leave for the job; False if that is not enough for it to start."""
    of_account = limits.of((job.queue, job.owner))
    if of_account is None:
        return True
    if of_account.room(job.job_id, gang.kind, gang.least).workers < gang.least:
        return False
    of_account.take(job.job_id, gang.kind, gang.least)
    return True


def _limits(snapshot: Snapshot, gangs: Gangs) -> QueueLimits:
    """With what groups that run hold and lack."""
    limits = QueueLimits(snapshot.queues, snapshot.holders, snapshot.used_up)
    for group in snapshot.growing:
        of_account = limits.of((group.queue, group.owner))
        if of_account is not None:
            of_account.take(group.job_id, gangs.of(group.request).kind, group.lacking)
    return limits


def _is_kept_back(job: WaitingJob, used_up: Collection[str]) -> bool:
    """Whether the job does not start before something happens that is not the scheduler's."""
    return bool(job.held or job.after) or job.queue in used_up


def _may_claim(job: WaitingJob, in_arrays: Counter[str], used_up: Collection[str]) -> bool:
    """Whether the job could start if there were slots. in_arrays: members that count already."""
    if _is_kept_back(job, used_up) or job.preparing or job.not_before:
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


def _waits_for_jobs(job: WaitingJob, position: int) -> Wait:
    reason = Reason("waiting_for_jobs", waits_for(job.after))
    return Wait(job.job_id, reason, position, tuple(one.id for one in job.after))


def _standing(rank: order.Rank) -> Standing:
    return int(rank.turn), rank.falling_priority, rank.user_is_ahead


class _Round:
    """The slots that are left while one plan is made."""

    def __init__(
        self,
        nodes: Sequence[Node],
        snapshot: Snapshot,
        gangs: Gangs,
        ranks: Mapping[str, order.Rank],
        now: datetime,
    ) -> None:
        """ranks: of the jobs that run."""
        self._nodes = nodes
        self._gangs = gangs
        self._ranks = ranks
        self._topology = Topology(snapshot.topology, [*nodes, *snapshot.to_come])
        self._stock = Stock(nodes, gangs, self._topology)
        running = eviction.cheapest_first(snapshot.running, ranks)
        self._candidates = eviction.Candidates(running, ranks, snapshot.min_run_s)
        self._leaving: dict[str, int] = {}
        """By job, its place among those that leave or shrink."""
        self._leaving_from: defaultdict[str, list[str]] = defaultdict(list)
        """By node."""
        for job in running:
            if job.is_leaving:
                self._expect(job, job.slices)
            elif job.recalled:
                self._expect(job, job.recalled)
        self._free = Pool(self._stock, When.FREE)
        self._open = Offer(self._stock)
        """Without what is reserved by blocked jobs ahead."""
        self._passable = Offer(self._stock)
        """Without what is reserved by those of them that have waited for long."""
        self._unreserved = Pool(self._stock, When.NOW)
        """Also with what is reserved."""
        soon = Pool(self._stock, When.SOON)
        self._backfill = Backfill(snapshot.running, ranks, soon, gangs, snapshot.min_run_s)
        if all(job.ends_within_s is None for job in snapshot.queue):
            self._backfill.close()
        self._limits = _limits(snapshot, gangs)
        self._obstacles = Obstacles(self._stock, snapshot.holders, self._free)
        self._to_come = snapshot.to_come
        self._impossible: dict[Gang, Reason | None] = {}
        self._too_large: dict[Gang, Reason | None] = {}
        self._unevictable: dict[tuple[WorkerKind, bool, bool], tuple[order.Rank, int]] = {}
        """Ranks, and how many workers would fit if all left that may be asked for these."""
        self._backing_off: list[tuple[WaitingJob, Gang]] = []
        self._now = now
        self.asked: list[Preempt | Shrink] = []
        self._running_of_arrays = Counter(snapshot.running_of_arrays)
        self._soon = soon
        self._snapshot = snapshot
        self._targets: Mapping[str, int] = {}
        """The sizes of jobs whose size is chosen."""

    def choose_sizes(self, waiting: Sequence[tuple[WaitingJob, Gang, order.Rank]]) -> None:
        """Choose the sizes of elastic jobs, and ask those for slots that run on more."""
        elastic, min_run_s = self._snapshot.elastic, self._snapshot.min_run_s
        claims: list[ElasticClaim] = []
        others: defaultdict[tuple[Standing, WorkerKind], int] = defaultdict(int)
        for job, gang, rank in waiting:
            backs_off = job.not_before is not None and job.not_before > self._now
            if backs_off or job.preparing or _is_kept_back(job, self._snapshot.used_up):
                continue
            standing = _standing(rank)
            # The rules for sizes don't know the room of a topology's domains.
            choice = elastic.get(job.job_id) if gang.kind.required is None else None
            if choice is None:
                others[standing, gang.kind] += gang.least
                continue
            comes_first = job.waited_s > order.LONGEST_WAIT_S
            claims.append(
                ElasticClaim(job.job_id, standing, gang.kind, choice, comes_first=comes_first)
            )
        sized = [
            job
            for job in self._snapshot.running
            if job.job_id in elastic
            and job.yields
            and not (job.is_leaving or job.recalled or job.request.required_level)
        ]
        for running in sized:
            claims.append(
                ElasticClaim(
                    running.job_id,
                    _standing(self._ranks[running.job_id]),
                    self._gangs.of(running.request).kind,
                    elastic[running.job_id],
                    held=count(running.slices),
                    stays=running.held_s < min_run_s,
                    comes_first=running.held_s < sizing.least_run_s(min_run_s, running.num_left),
                )
            )
        self._targets = targets(claims, others, self._soon.room, self._stock.largest)
        for running in sized:
            self._resize(running, self._targets[running.job_id])

    def _resize(self, running: RunningJob, target: int) -> None:
        """Have a running job give up what it has beyond the size that was chosen, or leave to
        resume on that size where it can't change its size in place."""
        held = count(running.slices)
        in_place = self._snapshot.elastic[running.job_id].in_place
        if held == target or len(self.asked) >= MAX_PREEMPTED or (in_place and target > held):
            return
        name = running.job_id
        if in_place and target:
            given, left = [], held
            for part in running.spare:
                if left - part.num_workers >= target:
                    given.append(part)
                    left -= part.num_workers
            if given:
                message = "goes on with fewer workers, because other jobs gain more by these"
                self._shrink(running, given, message, name)
            return
        message = (
            f"leaves its slots and resumes on {workers(target)} instead of {held}, by its speed"
            if target
            else "leaves its slots for a while, because other jobs gain more by them"
        )
        self.asked.append(Preempt(name, Reason("resized", message), name))
        self._backfill.leaves(name)
        self._expect(running, running.slices)

    def serve(self, group: Growing) -> Decision:
        """Give a group that stands by all that it lacks, of any free slots."""
        gang, lacking = self._gangs.of(group.request), group.lacking
        slices = self._free.pack_near(gang.kind, lacking, lacking, group.node_ids)
        if slices is not None:
            return self._grow(group, gang, slices)
        sentence = f"stands by for {workers(lacking)} of {gang.bundle_spoken}"
        reason, ahead = self._why_no_more(sentence, group, gang, lacking)
        self._set_aside(group.job_id, gang, lacking)
        self._backfill.close()
        return Stay(group.job_id, reason, ahead)

    def decide(self, job: WaitingJob, gang: Gang, rank: order.Rank, position: int) -> Decision:
        if job.after:
            return _waits_for_jobs(job, position)
        if (impossible := self._never_fits(gang)) is not None:
            return Impossible(job.job_id, impossible)
        if job.not_before is not None and job.not_before > self._now:
            self._back_off(job, gang, job.not_before)
            message = f"is tried again at {job.not_before:%H:%M:%S} UTC, its last attempt failed"
            return Wait(job.job_id, Reason("backing_off", message), position)
        if job.array is not None and self._is_full(job.array):
            return Wait(job.job_id, Reason("array_limit", job.array.sentence), position)
        if job.preparing is not None:
            self._backing_off.append((job, gang))
            reason = Reason("preparing_environment", job.preparing)
            return Wait(job.job_id, reason, position)
        kind, least, most = gang.kind, gang.least, gang.request.num_workers
        limits = self._limits.of((job.queue, job.owner))
        if limits is not None:
            room = limits.room(job.job_id, kind, least)
            if room.workers < least:
                limits.keep_place(job.job_id, kind, least, room)
                reason = Reason(room.code, f"{gang.needs}; {room.message}")
                return Wait(job.job_id, reason, position, room.holders)
            most = min(most, room.workers)
        target = self._targets.get(job.job_id)
        offer = self._passable if job.yields else self._open
        if target == 0 and offer.soon.has(kind, least):
            message = f"{gang.needs}; other jobs gain more by the slots that there are"
            return Wait(job.job_id, Reason("others_gain_more", message), position)
        if target:
            most = max(least, min(most, target))
            if not offer.now.has(kind, most) and offer.soon.has(kind, most):
                return self._promise(job, gang, offer, most, position)
        slices = offer.now.pack_most(kind, least, most)
        if slices is None and self._backfill.may_pass(job.ends_within_s):
            slices = self._unreserved.pack_most(kind, least, most)
        if slices is not None:
            self._take(job.job_id, kind, slices)
            if limits is not None:
                limits.take(job.job_id, kind, count(slices))
            self._count_in_array(job)
            return Start(job.job_id, slices)
        if limits is not None:
            limits.keep_place(job.job_id, kind, most)
        if offer.soon.has(kind, least) or self._evict(job, gang, rank, offer):
            self._count_in_array(job)
            return self._promise(job, gang, offer, most, position)
        reason, ahead = self._obstacles.why_waiting(job.job_id, gang)
        if self._to_come and (lacks := self._lacks_nodes(gang)) is not None:
            reason, ahead = lacks, ()
        self._set_aside(job.job_id, gang, most, job.waited_s > order.LONGEST_WAIT_S)
        self._backfill.block(kind, least, rank)
        return Wait(job.job_id, reason, position, ahead)

    def _back_off(self, job: WaitingJob, gang: Gang, until: datetime) -> None:
        """Let a job that is tried again soon keep its place, as if it waited for slots."""
        kind, most = gang.kind, gang.request.num_workers
        limits = self._limits.of((job.queue, job.owner))
        if limits is not None:
            most = min(most, limits.room(job.job_id, kind, gang.least).workers)
        is_full = job.array is not None and self._is_full(job.array)
        is_soon = (until - self._now).total_seconds() <= SOON_S
        if not is_soon or is_full or most < gang.least:
            self._backing_off.append((job, gang))
            return
        if limits is not None:
            limits.keep_place(job.job_id, kind, most)
        offer = self._passable if job.yields else self._open
        slices = offer.now.pack_most(kind, gang.least, most)
        if slices is None:
            self._set_aside(job.job_id, gang, most, job.waited_s > order.LONGEST_WAIT_S)
        else:
            self._stock.promise(kind, slices)
            self._obstacles.block(job.job_id, kind)

    def _never_fits(self, gang: Gang) -> Reason | None:
        if self._stock.whole(gang.kind) >= gang.least:
            return None
        if gang not in self._impossible:
            nodes = [*self._nodes, *self._to_come]
            self._impossible[gang] = can_ever_fit(gang.request, nodes, self._topology)
        return self._impossible[gang]

    def _lacks_nodes(self, gang: Gang) -> Reason | None:
        """Why the nodes that are there could not run the gang even if they were empty."""
        if self._stock.whole(gang.kind) >= gang.least:
            return None
        if gang not in self._too_large:
            reason = can_ever_fit(gang.request, self._nodes, self._topology)
            if reason is not None:
                why = reason.message if self._nodes else "there is none that it could use"
                message = f"{gang.needs}, and waits for nodes: {why}"
                reason = Reason("waiting_for_nodes", message)
            self._too_large[gang] = reason
        return self._too_large[gang]

    def _evict(self, job: WaitingJob, gang: Gang, rank: order.Rank, offer: Offer) -> bool:
        """Have running jobs leave slots for this one; False where not enough may be asked. Jobs
        whose sizes are chosen leave none to each other but by these."""
        is_sized = job.job_id in self._targets
        key = gang.kind, job.yields, is_sized
        tried = self._unevictable.get(key)
        is_weaker = tried is not None and gang.least > tried[1] and rank.may_less(tried[0])
        if is_weaker or len(self.asked) >= MAX_PREEMPTED:
            return False
        kept = self._leaving.keys() | self._targets.keys() if is_sized else self._leaving
        candidates = self._candidates.of(rank, kept)
        found = eviction.victims(gang.kind, gang.least, offer.soon, candidates, self._gangs)
        if not found.asks:
            self._unevictable[key] = rank, found.room
            return False
        self._unevictable.clear()
        of_jobs: dict[str, list[eviction.Ask]] = {}
        for ask in found.asks:
            of_jobs.setdefault(ask.running.job_id, []).append(ask)
        for asks in of_jobs.values():
            self._ask(asks, job.job_id, rank)
        return True

    def _ask(self, asks: Sequence[eviction.Ask], name: str, coming: order.Rank) -> None:
        """Ask one running job for all of these slots on behalf of the job of this name."""
        running = asks[0].running
        slices = tuple(part for ask in asks for part in ask.slices)
        if any(ask.is_all for ask in asks):
            why = eviction.because(coming, self._ranks[running.job_id])
            reason = Reason("preempted", f"leaves its slots to job {name}, which {why}")
            self.asked.append(Preempt(running.job_id, reason, name))
            self._backfill.leaves(running.job_id)
            slices = running.slices
        else:
            message = f"goes on with fewer workers, so that job {name} can start"
            self._shrink(running, slices, message, name)
            return
        self._expect(running, slices)

    def _shrink(
        self, running: RunningJob, slices: Sequence[Slice], message: str, because_of: str
    ) -> None:
        """Ask a group for these of its slots."""
        name, kind = running.job_id, self._gangs.of(running.request).kind
        batch_size = self._batch_size(name, kind, count(running.slices) - count(slices))
        reason = Reason("shrinks", message)
        self.asked.append(Shrink(name, tuple(slices), reason, because_of, batch_size))
        self._expect(running, slices)

    def _batch_size(self, job_id: str, kind: WorkerKind, num_workers: int) -> int | None:
        """The global batch of a job that trains on so many workers; None if it has no choice."""
        job = self._snapshot.elastic.get(job_id)
        if job is None or job.batch_range is None:
            return None
        return sizing.best_batch(job, num_workers, max(1, self._stock.largest(kind)))

    def _expect(self, running: RunningJob, slices: Sequence[Slice]) -> None:
        """It leaves these slots."""
        self._leaving[running.job_id] = len(self._leaving)
        for part in slices:
            self._leaving_from[part.node_id].append(running.job_id)
        self._stock.expect(self._gangs.of(running.request).kind, slices)

    def _promise(self, job: WaitingJob, gang: Gang, offer: Offer, most: int, position: int) -> Wait:
        """Keep slots of which some are about to be left."""
        slices = offer.soon.pack_most(gang.kind, gang.least, most)
        assert slices is not None, "the slots of those that leave are enough"
        self._stock.promise(gang.kind, slices)
        self._obstacles.block(job.job_id, gang.kind)
        there = {name for part in slices for name in self._leaving_from[part.node_id]}
        leaving = tuple(sorted(there, key=lambda name: self._leaving[name]))
        verb = "makes" if len(leaving) == 1 else "make"
        message = f"{gang.needs}; {jobs(leaving)} {verb} room for it"
        return Wait(job.job_id, Reason("room_is_made", message), position, leaving, slices)

    def _is_full(self, array: ArrayLimit) -> bool:
        return self._running_of_arrays[array.array_id] >= array.max_running

    def _count_in_array(self, job: WaitingJob) -> None:
        if job.array is not None:
            self._running_of_arrays[job.array.array_id] += 1

    def end_queue(self) -> None:
        """Set aside what jobs reserve that back off, before groups grow."""
        for job, gang in self._backing_off:
            most = gang.request.num_workers
            self._set_aside(job.job_id, gang, most)
            limits = self._limits.of((job.queue, job.owner))
            if limits is not None:
                limits.keep_place(job.job_id, gang.kind, most)

    def grow(self, group: Growing) -> Decision:
        """Give a group that trains the slots it can use and nobody has reserved."""
        gang = self._gangs.of(group.request)
        kind = gang.kind
        most, held = group.most, count(group.slices)
        if group.job_id in self._targets:
            most = min(most, self._targets[group.job_id] - held)
        if most <= 0:
            message = f"trains on {workers(held)}; other jobs gain more by the slots that there are"
            return Stay(group.job_id, Reason("others_gain_more", message))
        limits = self._limits.of((group.queue, group.owner))
        sentence = f"could use {workers(group.most)} more of {gang.bundle_spoken}"
        if limits is not None:
            room = limits.room(group.job_id, kind, 1)
            if not room.workers:
                reason = Reason(room.code, f"{sentence}; {room.message}")
                return Stay(group.job_id, reason, room.holders)
            most = min(most, room.workers)
        slices = self._open.now.pack_near(kind, 1, most, group.node_ids)
        if slices is not None:
            if limits is not None:
                limits.take(group.job_id, kind, count(slices))
            return self._grow(group, gang, slices)
        return Stay(group.job_id, *self._why_no_more(sentence, group, gang, 1))

    def _why_no_more(
        self, sentence: str, group: Growing, gang: Gang, least: int
    ) -> tuple[Reason, tuple[str, ...]]:
        free = self._free.room_near(gang.kind, group.node_ids)
        return self._obstacles.why(sentence, group.job_id, gang.kind, least, free)

    def _grow(self, group: Growing, gang: Gang, slices: tuple[Slice, ...]) -> Grow:
        self._take(group.job_id, gang.kind, slices)
        num_workers = count(group.slices) + count(slices)
        return Grow(group.job_id, slices, self._batch_size(group.job_id, gang.kind, num_workers))

    def _take(self, job_id: str, kind: WorkerKind, slices: tuple[Slice, ...]) -> None:
        self._stock.take(kind, slices)
        self._obstacles.hold(job_id, slices)

    def _set_aside(self, job_id: str, gang: Gang, most: int, is_impatient: bool = True) -> None:
        self._obstacles.block(job_id, gang.kind)
        self._open.reserved.set_aside(gang.kind, most)
        if is_impatient:
            self._passable.reserved.set_aside(gang.kind, most)
