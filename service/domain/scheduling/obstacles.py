"""Why a job waits: the sentences, and the jobs that are in its way."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.pools import Pool
from service.domain.scheduling.slots import Holder, Node, Request, count, fits, kind_of

MAX_NAMED = 100
"""Jobs in the way that are named; the sentence says how many there are."""

Kind = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Reason:
    code: str
    message: str


class Obstacles:
    """Jobs that hold slots, and jobs ahead that have reserved some, as a plan goes on."""

    def __init__(self, nodes: Sequence[Node], holders: Sequence[Holder], free: Pool) -> None:
        self._nodes = nodes
        self._free = free
        self._holders = list(holders)
        self._blocked: defaultdict[Kind, list[tuple[int, str]]] = defaultdict(list)
        """By the kind of their workers: place and job, in the order of the queue."""
        self._bundles: dict[Kind, Mapping[str, float]] = {}
        self._num_blocked = 0
        self._held: dict[Kind, tuple[int, dict[str, int]]] = {}
        """Slots that jobs hold where the kind could run; with the number of holders then."""
        self._usable: dict[Kind, frozenset[str]] = {}
        self._same_slots: dict[tuple[Kind, Kind], bool] = {}

    def hold(self, job_id: str, slices: tuple[Slice, ...], bundle: Mapping[str, float]) -> None:
        self._holders.append(Holder(job_id, slices, bundle))

    def block(self, job_id: str, bundle: Mapping[str, float]) -> None:
        """The job has reserved slots."""
        kind = kind_of(bundle)
        self._bundles[kind] = bundle
        self._blocked[kind].append((self._num_blocked, job_id))
        self._num_blocked += 1

    def why(
        self, sentence: str, job_id: str, request: Request, least: int
    ) -> tuple[Reason, tuple[str, ...]]:
        """Why so many workers are not available, and which jobs are in the way."""
        free = self._free.room(request.bundle)
        if free >= least:
            ahead, number = self._ahead(request.bundle)
            message = (
                f"{sentence}; {free} could start, but {jobs(ahead, number)} "
                f"{'is' if number == 1 else 'are'} ahead in the queue and "
                f"{'needs' if number == 1 else 'need'} the same slots"
            )
            return Reason("behind_in_queue", message), ahead
        held = self._held_where(request.bundle)
        own = held.get(job_id, 0)
        others = len(held) - (job_id in held)
        names = (name for name in held if name != job_id)
        named = tuple(itertools.islice(names, MAX_NAMED))
        message = f"{sentence}; {free} {'is' if free == 1 else 'are'} free"
        if others:
            verb = "holds" if others == 1 else "hold"
            message += f", {jobs(named, others)} {verb} {sum(held.values()) - own}"
        elif sum(fits(request.bundle, node.total) for node in self._nodes) > self._holds(job_id):
            message += ", others use the rest of the cluster"
        else:
            message += ", and it holds all that the cluster has"
        return Reason("waiting_for_slots", message), named

    def _held_where(self, bundle: Mapping[str, float]) -> Mapping[str, int]:
        """Slots that jobs hold on nodes where a worker with this bundle could run."""
        kind = kind_of(bundle)
        counted, held = self._held.get(kind, (0, {}))
        usable = self._usable_by(bundle)
        for holder in self._holders[counted:]:
            there = sum(part.num_workers for part in holder.slices if part.node_id in usable)
            if there:
                held[holder.job_id] = held.get(holder.job_id, 0) + there
        self._held[kind] = len(self._holders), held
        return held

    def _holds(self, job_id: str) -> int:
        return sum(count(holder.slices) for holder in self._holders if holder.job_id == job_id)

    def _usable_by(self, bundle: Mapping[str, float]) -> frozenset[str]:
        kind = kind_of(bundle)
        if kind not in self._usable:
            usable = (node.id for node in self._nodes if fits(bundle, node.total))
            self._usable[kind] = frozenset(usable)
        return self._usable[kind]

    def _ahead(self, bundle: Mapping[str, float]) -> tuple[tuple[str, ...], int]:
        """Blocked jobs ahead that have reserved slots of a node on which this job could run, and
        how many there are."""
        rivals = [of for kind, of in self._blocked.items() if self._rival(bundle, kind)]
        named = itertools.islice(heapq.merge(*rivals), MAX_NAMED)
        return tuple(job_id for _, job_id in named), sum(map(len, rivals))

    def _rival(self, bundle: Mapping[str, float], other: Kind) -> bool:
        key = kind_of(bundle), other
        if key not in self._same_slots:
            theirs = self._usable_by(self._bundles[other])
            self._same_slots[key] = not self._usable_by(bundle).isdisjoint(theirs)
        return self._same_slots[key]


def jobs(names: Sequence[str], number: int | None = None) -> str:
    """`jobs a, b, c and 7 more`; number: how many there are, if not all are named."""
    number = len(names) if number is None else number
    shown = ", ".join(names[:3])
    more = f" and {number - 3} more" if number > 3 else ""
    return f"{'job' if number == 1 else 'jobs'} {shown}{more}"
