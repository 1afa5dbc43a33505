"""Why a job waits: the sentences, and the jobs that are in its way."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.pools import Pool
from service.domain.scheduling.slots import Holder, Kind, Node, Request, count, fits

MAX_NAMED = 20
"""Jobs in the way that are named; the sentence says how many there are."""


@dataclass(frozen=True)
class Reason:
    code: str
    message: str


class _Held:
    """Slots that jobs hold where workers of one kind could run."""

    def __init__(self, by: Mapping[str, int], num_holders: int) -> None:
        self.by = by
        self.total = sum(by.values())
        self.named = tuple(itertools.islice(by, MAX_NAMED))
        self.num_holders = num_holders
        """As many holders there were when they were counted."""


class Obstacles:
    """Jobs that hold slots, and jobs ahead that have reserved some, as a plan goes on."""

    def __init__(self, nodes: Sequence[Node], holders: Sequence[Holder], free: Pool) -> None:
        self._nodes = nodes
        self._free = free
        self._holders = list(holders)
        self._blocked: defaultdict[Kind, list[tuple[int, str]]] = defaultdict(list)
        """By the kind of their workers: place and job, in the order of the queue."""
        self._num_blocked = 0
        self._held: dict[Kind, _Held] = {}
        self._usable: dict[Kind, frozenset[str]] = {}
        self._same_slots: dict[tuple[Kind, Kind], bool] = {}

    def hold(self, job_id: str, slices: tuple[Slice, ...], bundle: Mapping[str, float]) -> None:
        self._holders.append(Holder(job_id, slices, bundle))

    def block(self, job_id: str, request: Request) -> None:
        """The job has reserved slots."""
        self._blocked[request.kind].append((self._num_blocked, job_id))
        self._num_blocked += 1

    def why(
        self, sentence: str, job_id: str, request: Request, least: int
    ) -> tuple[Reason, tuple[str, ...]]:
        """Why so many workers are not available, and which jobs are in the way."""
        free = self._free.room(request)
        if free >= least:
            ahead, number = self._ahead(request)
            message = (
                f"{sentence}; {free} could start, but {jobs(ahead, number)} "
                f"{'is' if number == 1 else 'are'} ahead in the queue and "
                f"{'needs' if number == 1 else 'need'} the same slots"
            )
            return Reason("behind_in_queue", message), ahead
        held = self._held_by_others(request, job_id)
        message = f"{sentence}; {free} {'is' if free == 1 else 'are'} free"
        if held.by:
            verb = "holds" if len(held.by) == 1 else "hold"
            message += f", {jobs(held.named, len(held.by))} {verb} {held.total}"
        elif sum(fits(request.bundle, node.total) for node in self._nodes) > self._holds(job_id):
            message += ", others use the rest of the cluster"
        else:
            message += ", and it holds all that the cluster has"
        return Reason("waiting_for_slots", message), held.named

    def _held_by_others(self, request: Request, job_id: str) -> _Held:
        """Slots of nodes where a worker of this request could run."""
        held = self._held.get(request.kind)
        if held is None or held.num_holders != len(self._holders):
            usable = self._usable_by(request.kind)
            by: dict[str, int] = {}
            for holder in self._holders:
                there = sum(part.num_workers for part in holder.slices if part.node_id in usable)
                if there:
                    by[holder.job_id] = by.get(holder.job_id, 0) + there
            held = self._held[request.kind] = _Held(by, len(self._holders))
        if job_id not in held.by:
            return held
        others = {name: number for name, number in held.by.items() if name != job_id}
        return _Held(others, held.num_holders)

    def _holds(self, job_id: str) -> int:
        return sum(count(holder.slices) for holder in self._holders if holder.job_id == job_id)

    def _usable_by(self, kind: Kind) -> frozenset[str]:
        if kind not in self._usable:
            bundle = dict(kind)
            self._usable[kind] = frozenset(n.id for n in self._nodes if fits(bundle, n.total))
        return self._usable[kind]

    def _ahead(self, request: Request) -> tuple[tuple[str, ...], int]:
        """Blocked jobs ahead that have reserved slots of a node on which this job could run, and
        how many there are."""
        rivals = [of for kind, of in self._blocked.items() if self._compete(request.kind, kind)]
        named = itertools.islice(heapq.merge(*rivals), MAX_NAMED)
        return tuple(job_id for _, job_id in named), sum(map(len, rivals))

    def _compete(self, kind: Kind, other: Kind) -> bool:
        if (kind, other) not in self._same_slots:
            shared = self._usable_by(kind) & self._usable_by(other)
            self._same_slots[kind, other] = bool(shared)
        return self._same_slots[kind, other]


def jobs(names: Sequence[str], number: int | None = None) -> str:
    """`jobs a, b, c and 7 more`; number: how many there are, if not all are named."""
    number = len(names) if number is None else number
    shown = ", ".join(names[:3])
    more = f" and {number - 3} more" if number > 3 else ""
    return f"{'job' if number == 1 else 'jobs'} {shown}{more}"
