"""The scheduling policy: which jobs start where, why the others wait, and which groups grow.

A gang starts whole or not at all; an elastic one also with fewer workers, from its least number
on. Jobs are considered by priority, then first come first served. A job that can't start yet
reserves all that it could ever use: on each node, as many of its workers' bundles as fit there when
the node is empty are set aside, and jobs behind it may take only the rest. So a small job
never delays a large one that came first (no backfill: running times are not known), yet passes it
on capacity that the large one has no use for, such as nodes of another kind. An elastic job that
starts small passes nobody either: it, too, takes only the rest.

Running groups get more slots at both ends of the queue. Before the queue: a group that lost slots
and lacks workers to train on. It was given its slots before any job that waits now, it holds the
rest of them, and it stands by for no more than half a minute. So it gets any free slot, also one
that a waiting job has reserved, and slots that it can't have yet are set aside as for a job ahead
of all others. After the queue: an elastic group that trains below its size gets slots that no
waiting job has reserved, by priority, then first come first served. Here jobs that back off reserve
slots, too: a job that starts before them ends some day, but a group keeps what it has grown into.

A job that waits for others to end, or whose array runs as many jobs as it may, could not use slots:
it reserves none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.dependencies import ArrayLimit, Dependency, waits_for
from service.domain.scheduling.slots import EPSILON as EPSILON
from service.domain.scheduling.slots import Holder as Holder
from service.domain.scheduling.slots import Node as Node
from service.domain.scheduling.slots import Request as Request
from service.domain.scheduling.slots import (
    amount_of,
    bundle_of,
    count,
    fits,
    needs,
    pack,
    pack_most,
    subtract,
    workers,
)
from service.domain.scheduling.slots import held_on as held_on
from service.domain.scheduling.slots import offered as offered
from service.domain.scheduling.slots import request_of as request_of


@dataclass(frozen=True)
class Reason:
    code: str
    message: str


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
    running_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs with slots, by array."""


@dataclass(frozen=True)
class Start:
    job_id: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Wait:
    job_id: str
    reason: Reason
    position: int
    """Place in the queue, 1 being next."""
    blocked_by: tuple[str, ...] = ()


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
class Stay:
    """A group that could use more slots gets none now."""

    job_id: str
    reason: Reason
    blocked_by: tuple[str, ...] = ()


Decision = Start | Wait | Impossible | Grow | Stay


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
    """One decision for each waiting job, in the order of the queue; then one for each group that
    could grow."""
    queue = sorted(snapshot.queue, key=lambda job: (-job.priority, job.seq))
    accepted = sorted((node for node in snapshot.nodes if node.accepted), key=lambda n: n.id)
    round_ = _Round(accepted if snapshot.connected else (), snapshot.holders, now)
    round_.running_of_arrays.update(snapshot.running_of_arrays)
    obstacle = _nothing_starts(snapshot, accepted)
    standing_by = [round_.serve(group) for group in snapshot.growing if group.lacking]
    if obstacle is not None:
        waits = [_held(job, n) or Wait(job.job_id, obstacle, n) for n, job in enumerate(queue, 1)]
        others = [Stay(g.job_id, obstacle) for g in snapshot.growing if not g.lacking]
        return [*waits, *standing_by, *others]
    decisions: list[Decision] = []
    position = 0
    for job in queue:
        decision = round_.decide(job, position + 1)
        position += isinstance(decision, Wait)
        decisions.append(decision)
    round_.end_queue()
    groups = sorted(snapshot.growing, key=lambda group: (-group.priority, group.seq))
    grown = [round_.grow(group) for group in groups if not group.lacking]
    return [*decisions, *standing_by, *grown]


def _nothing_starts(snapshot: Snapshot, accepted: Sequence[Node]) -> Reason | None:
    if not snapshot.connected:
        return Reason("cluster_unavailable", "waits for the Ray cluster, which does not answer")
    if snapshot.nodes and not accepted:
        return Reason("no_nodes", "waits for a node: every node of the cluster is refused")
    if not accepted:
        return Reason("no_nodes", "waits for a node: the cluster has none yet")
    if snapshot.storage_problem is not None:
        return Reason("storage_full", f"waits for room: {snapshot.storage_problem}")
    return None


def _held(job: WaitingJob, position: int) -> Wait | None:
    """Why the job would not start whatever slots there are."""
    if not job.after:
        return None
    reason = Reason("waiting_for_jobs", waits_for(job.after))
    return Wait(job.job_id, reason, position, tuple(one.id for one in job.after))


class _Round:
    """The slots that are left while one plan is made."""

    def __init__(self, nodes: Sequence[Node], holders: Sequence[Holder], now: datetime) -> None:
        self._nodes = nodes
        self._free = {node.id: dict(node.available_to_us) for node in nodes}
        self._open = {node.id: dict(node.available_to_us) for node in nodes}
        """As `_free`, without what is reserved by blocked jobs ahead."""
        self._holders = list(holders)
        self._blocked: list[tuple[str, Request]] = []
        self._backing_off: list[WaitingJob] = []
        self._now = now
        self.running_of_arrays: Counter[str] = Counter()

    def serve(self, group: Growing) -> Decision:
        """Give a group that stands by all that it lacks, of any free slots."""
        slices = pack(group.request.bundle, group.lacking, self._free)
        if slices is not None:
            return self._grow(group, slices)
        reason, ahead = self._why(
            f"stands by for {workers(group.lacking)} of {bundle_of(group.request)}",
            group.job_id,
            group.request,
            group.lacking,
        )
        self._set_aside(group.job_id, group.request, group.lacking)
        return Stay(group.job_id, reason, ahead)

    def decide(self, job: WaitingJob, position: int) -> Decision:
        held = _held(job, position)
        if held is not None:
            return held
        impossible = can_ever_fit(job.request, self._nodes)
        if impossible is not None:
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
        request = job.request
        slices = pack_most(request.bundle, request.least, request.num_workers, self._open)
        if slices is None:
            reason, ahead = self._why(needs(request), job.job_id, request, request.least)
            self._set_aside(job.job_id, request, request.num_workers)
            return Wait(job.job_id, reason, position, ahead)
        self._take(job.job_id, request, slices)
        if job.array is not None:
            self.running_of_arrays[job.array.array_id] += 1
        return Start(job.job_id, slices)

    def _is_full(self, array: ArrayLimit) -> bool:
        return self.running_of_arrays[array.array_id] >= array.max_running

    def end_queue(self) -> None:
        """Set aside what jobs reserve that back off, before groups grow."""
        for job in self._backing_off:
            self._set_aside(job.job_id, job.request, job.request.num_workers)

    def grow(self, group: Growing) -> Decision:
        """Give a group that trains the slots it can use and nobody has reserved."""
        request = group.request
        slices = pack_most(request.bundle, 1, group.most, self._open)
        if slices is not None:
            return self._grow(group, slices)
        sentence = f"could use {workers(group.most)} more of {bundle_of(request)}"
        return Stay(group.job_id, *self._why(sentence, group.job_id, request, 1))

    def _grow(self, group: Growing, slices: tuple[Slice, ...]) -> Grow:
        self._take(group.job_id, group.request, slices)
        return Grow(group.job_id, slices)

    def _take(self, job_id: str, request: Request, slices: tuple[Slice, ...]) -> None:
        for part in slices:
            for free in (self._free[part.node_id], self._open[part.node_id]):
                subtract(free, request.bundle, part.num_workers)
        self._holders.append(Holder(job_id, slices, request.bundle))

    def _set_aside(self, job_id: str, request: Request, most: int) -> None:
        self._blocked.append((job_id, request))
        for node in self._nodes:
            number = min(most, fits(request.bundle, node.total))
            subtract(self._open[node.id], request.bundle, number)

    def _why(
        self, sentence: str, job_id: str, request: Request, least: int
    ) -> tuple[Reason, tuple[str, ...]]:
        """Why so many workers are not available, and which jobs are in the way."""
        free = sum(fits(request.bundle, free) for free in self._free.values())
        if free >= least:
            ahead = self._in_the_way(request)
            message = (
                f"{sentence}; {free} could start, but {_jobs(ahead)} "
                f"{'is' if len(ahead) == 1 else 'are'} ahead in the queue and "
                f"{'needs' if len(ahead) == 1 else 'need'} the same slots"
            )
            return Reason("behind_in_queue", message), ahead
        usable = {node.id for node in self._nodes if fits(request.bundle, node.total)}
        held: dict[str, int] = {}
        for holder in self._holders:
            there = sum(p.num_workers for p in holder.slices if p.node_id in usable)
            if there and holder.job_id != job_id:
                held[holder.job_id] = held.get(holder.job_id, 0) + there
        message = f"{sentence}; {free} {'is' if free == 1 else 'are'} free"
        if held:
            verb = "holds" if len(held) == 1 else "hold"
            message += f", {_jobs([*held])} {verb} {sum(held.values())}"
        elif sum(fits(request.bundle, node.total) for node in self._nodes) > self._holds(job_id):
            message += ", others use the rest of the cluster"
        else:
            message += ", and it holds all that the cluster has"
        return Reason("waiting_for_slots", message), tuple(held)

    def _holds(self, job_id: str) -> int:
        return sum(count(holder.slices) for holder in self._holders if holder.job_id == job_id)

    def _in_the_way(self, request: Request) -> tuple[str, ...]:
        """Blocked jobs ahead that have reserved slots of a node on which this job could run."""
        usable = [node for node in self._nodes if fits(request.bundle, node.total)]
        return tuple(
            job_id
            for job_id, ahead in self._blocked
            if any(fits(ahead.bundle, node.total) for node in usable)
        )


def _jobs(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'job' if len(names) == 1 else 'jobs'} {shown}{more}"
