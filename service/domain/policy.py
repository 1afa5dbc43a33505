"""Which waiting jobs start, where, and why the others wait.

A gang starts whole or not at all. Jobs are looked at by priority, then first come first served.
A job that can't start yet keeps what it could ever use: on each node, as many of its workers'
bundles as fit there when the node is empty are set aside, and jobs behind it may take only what
is left over. So a small job never delays a large one that came first (no backfill: running times
are not known), yet passes it on capacity that the large one has no use for, such as nodes of
another kind.

Resource names are Ray's: `CPU`, `GPU`, `memory`, `accelerator_type:H100`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from dray.spec import Resources

EPSILON = 1e-6
"""Ray counts resources in ten-thousandths; sums of floats are only nearly exact."""

ACCELERATOR_SHARE = 0.001
"""What Ray itself asks of `accelerator_type:X` to bind a worker to such a node."""


@dataclass(frozen=True)
class Reason:
    code: str
    message: str


@dataclass(frozen=True)
class Request:
    """What a gang asks for: `num_workers` times `bundle`."""

    num_workers: int
    bundle: Mapping[str, float]


@dataclass(frozen=True)
class WaitingJob:
    job_id: str
    attempt: int
    """Number of its newest attempt: what a claim must still find."""
    priority: int
    seq: int
    """Order of submission."""
    request: Request
    not_before: datetime | None = None


@dataclass(frozen=True)
class Slice:
    """The part of a gang that one node carries."""

    node_id: str
    num_workers: int


@dataclass(frozen=True)
class Holder:
    """A job that has slots."""

    job_id: str
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]


@dataclass(frozen=True)
class Node:
    id: str
    total: Mapping[str, float]
    available_to_us: Mapping[str, float]
    """What a launch may take now: see `offered`."""
    accepted: bool = True


@dataclass(frozen=True)
class Snapshot:
    queue: tuple[WaitingJob, ...]
    nodes: tuple[Node, ...]
    connected: bool
    holders: tuple[Holder, ...] = ()
    """Who has slots: for the sentences only, `available_to_us` has been reduced by them."""
    storage_problem: str | None = None
    """Why nothing may start though there are slots: the storage is full."""


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


Decision = Start | Wait | Impossible


def request_of(resources: Resources) -> Request:
    """What a job document asks for, in Ray's names."""
    bundle = {"CPU": float(resources.cpus_per_worker)}
    if resources.gpus_per_worker:
        bundle["GPU"] = float(resources.gpus_per_worker)
    if resources.memory_bytes is not None:
        bundle["memory"] = float(resources.memory_bytes)
    if resources.accelerator is not None:
        bundle[f"accelerator_type:{resources.accelerator}"] = ACCELERATOR_SHARE
    return Request(resources.num_workers, bundle)


def offered(
    total: Mapping[str, float],
    available: Mapping[str, float],
    held: Mapping[str, float],
) -> dict[str, float]:
    """What a launch may take of a node: Ray's free slots, but never what our own attempts hold.

    A claim counts at once, though Ray learns of it later; others' use shows in Ray's books only.
    """
    return {
        name: max(0.0, min(available.get(name, 0.0), amount - held.get(name, 0.0)))
        for name, amount in total.items()
    }


def held_on(node_id: str, holders: Sequence[Holder]) -> dict[str, float]:
    """Sum of what the holders have on one node."""
    held: dict[str, float] = {}
    for holder in holders:
        workers = sum(part.num_workers for part in holder.slices if part.node_id == node_id)
        for name, amount in holder.bundle.items() if workers else ():
            held[name] = held.get(name, 0.0) + workers * amount
    return held


def fits(bundle: Mapping[str, float], free: Mapping[str, float]) -> int:
    """How many workers with this bundle the free resources carry."""
    counts = [
        math.floor((free.get(name, 0.0) + EPSILON) / amount)
        for name, amount in bundle.items()
        if amount > 0
    ]
    return max(0, min(counts, default=0))


def can_ever_fit(request: Request, nodes: Sequence[Node]) -> Reason | None:
    """None if the accepted nodes could run the gang were they empty; else why not."""
    totals = [node.total for node in nodes if node.accepted]
    most = sum(fits(request.bundle, total) for total in totals)
    if most >= request.num_workers:
        return None
    if most:
        return Reason(
            "unsatisfiable",
            f"{_needs(request)}, but the whole cluster has room for {most} at once",
        )
    lacking = [
        (name, amount, max((total.get(name, 0.0) for total in totals), default=0.0))
        for name, amount in request.bundle.items()
    ]
    missing = [entry for entry in lacking if entry[2] + EPSILON < entry[1]]
    if not missing:
        return Reason(
            "unsatisfiable",
            f"{_needs(request)}, and no single node of the cluster has all of it",
        )
    name, amount, best = missing[0]
    if name.startswith("accelerator_type:"):
        kind = name.removeprefix("accelerator_type:")
        return Reason("unsatisfiable", f"no node of the cluster has the accelerator {kind}")
    return Reason(
        "unsatisfiable",
        f"each worker needs {_amount(name, amount)}, but the largest node has "
        f"{_amount(name, best) if best else f'no {name}'}",
    )


def lacking_resource(request: Request, nodes: Sequence[Node]) -> str | None:
    """Which resource no accepted node has enough of for one worker; None if it is their number."""
    totals = [node.total for node in nodes if node.accepted]
    for name, amount in request.bundle.items():
        if all(total.get(name, 0.0) + EPSILON < amount for total in totals):
            return name
    return None


def plan(snapshot: Snapshot, now: datetime) -> list[Decision]:
    """One decision for each waiting job, in the order of the queue."""
    queue = sorted(snapshot.queue, key=lambda job: (-job.priority, job.seq))
    accepted = sorted((node for node in snapshot.nodes if node.accepted), key=lambda n: n.id)
    obstacle = _nothing_starts(snapshot, accepted)
    if obstacle is not None:
        return [Wait(job.job_id, obstacle, place) for place, job in enumerate(queue, 1)]
    round_ = _Round(accepted, snapshot.holders, now)
    decisions: list[Decision] = []
    position = 0
    for job in queue:
        decision = round_.decide(job, position + 1)
        position += isinstance(decision, Wait)
        decisions.append(decision)
    return decisions


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


class _Round:
    """What is left to give while one plan is made."""

    def __init__(self, nodes: Sequence[Node], holders: Sequence[Holder], now: datetime) -> None:
        self._nodes = nodes
        self._free = {node.id: dict(node.available_to_us) for node in nodes}
        self._open = {node.id: dict(node.available_to_us) for node in nodes}
        """As `_free`, less what blocked jobs ahead have a claim to."""
        self._holders = list(holders)
        self._blocked: list[WaitingJob] = []
        self._now = now

    def decide(self, job: WaitingJob, position: int) -> Decision:
        impossible = can_ever_fit(job.request, self._nodes)
        if impossible is not None:
            return Impossible(job.job_id, impossible)
        if job.not_before is not None and job.not_before > self._now:
            message = f"is tried again at {job.not_before:%H:%M:%S} UTC, its last attempt failed"
            return Wait(job.job_id, Reason("backing_off", message), position)
        slices = _pack(job.request, self._open)
        if slices is None:
            decision = self._wait(job, position)
            self._set_aside(job)
            return decision
        self._take(job, slices)
        return Start(job.job_id, slices)

    def _take(self, job: WaitingJob, slices: tuple[Slice, ...]) -> None:
        for part in slices:
            for free in (self._free[part.node_id], self._open[part.node_id]):
                _subtract(free, job.request.bundle, part.num_workers)
        self._holders.append(Holder(job.job_id, slices, job.request.bundle))

    def _set_aside(self, job: WaitingJob) -> None:
        self._blocked.append(job)
        for node in self._nodes:
            most = min(job.request.num_workers, fits(job.request.bundle, node.total))
            _subtract(self._open[node.id], job.request.bundle, most)

    def _wait(self, job: WaitingJob, position: int) -> Wait:
        request = job.request
        free = sum(fits(request.bundle, free) for free in self._free.values())
        if free >= request.num_workers:
            ahead = self._in_the_way(job)
            message = (
                f"{_needs(request)}; {free} could start, but {_jobs(ahead)} "
                f"{'is' if len(ahead) == 1 else 'are'} ahead in the queue and "
                f"{'needs' if len(ahead) == 1 else 'need'} the same slots"
            )
            return Wait(job.job_id, Reason("behind_in_queue", message), position, ahead)
        usable = {node.id for node in self._nodes if fits(request.bundle, node.total)}
        mine = [h for h in self._holders if any(part.node_id in usable for part in h.slices)]
        names = tuple(dict.fromkeys(holder.job_id for holder in mine))
        held = sum(part.num_workers for h in mine for part in h.slices if part.node_id in usable)
        message = f"{_needs(request)}; {free} {'is' if free == 1 else 'are'} free"
        if names:
            message += f", {_jobs(names)} {'holds' if len(names) == 1 else 'hold'} {held}"
        else:
            message += ", others use the rest of the cluster"
        return Wait(job.job_id, Reason("waiting_for_slots", message), position, names)

    def _in_the_way(self, job: WaitingJob) -> tuple[str, ...]:
        """Blocked jobs ahead that have a claim to a node on which this job could run."""
        usable = [node for node in self._nodes if fits(job.request.bundle, node.total)]
        return tuple(
            ahead.job_id
            for ahead in self._blocked
            if any(fits(ahead.request.bundle, node.total) for node in usable)
        )


def _pack(request: Request, free: Mapping[str, Mapping[str, float]]) -> tuple[Slice, ...] | None:
    """Slices of the gang on as few nodes as possible, or None if it does not fit now.

    The fullest-fitting node first; what remains at the end goes to the tightest node that takes
    all of it, so that large holes stay whole.
    """
    room = {node_id: fits(request.bundle, there) for node_id, there in free.items()}
    if sum(room.values()) < request.num_workers:
        return None
    slices: list[Slice] = []
    left = request.num_workers
    while left:
        enough = [node_id for node_id, count in room.items() if count >= left]
        if enough:
            chosen = min(enough, key=lambda node_id: (room[node_id], node_id))
        else:
            chosen = min(room, key=lambda node_id: (-room[node_id], node_id))
        count = min(left, room.pop(chosen))
        slices.append(Slice(chosen, count))
        left -= count
    return tuple(slices)


def _subtract(free: dict[str, float], bundle: Mapping[str, float], times: int) -> None:
    for name, amount in bundle.items():
        free[name] = max(0.0, free.get(name, 0.0) - times * amount)


def _needs(request: Request) -> str:
    workers = "1 worker" if request.num_workers == 1 else f"{request.num_workers} workers"
    parts = [
        _amount(name, amount)
        for name, amount in request.bundle.items()
        if not name.startswith("accelerator_type:")
    ]
    kinds = [
        name.removeprefix("accelerator_type:")
        for name in request.bundle
        if name.startswith("accelerator_type:")
    ]
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"needs {workers} of {what}" + (f" on {kinds[0]}" if kinds else "")


def _amount(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / 2**30:.3g} GiB of memory"
    return f"{amount:g} {name}"


def _jobs(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'job' if len(names) == 1 else 'jobs'} {shown}{more}"
