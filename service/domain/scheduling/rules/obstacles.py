"""Explains why a job waits, and which jobs block it.

Jobs that are considered later in the same plan can also get slots, so the messages about free slots
and about the jobs that hold slots are created at the end of the plan. The jobs ahead of a job are
recorded when the job is considered.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import Gang, WorkerKind
from service.domain.scheduling.placement.node_kinds import NodeKinds
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.placement.slots import Fence, Holder, Node, fits
from service.domain.scheduling.placement.topology import largest, name_of
from service.domain.scheduling.rules.reservations import RESERVED

MAX_NAMED = 20
"""Maximum number of blocking jobs to list. The message also contains their total number."""

PREPARING = "preparing_environment"
"""Code of the reason of a job whose environment is not ready yet."""


@dataclass(slots=True, unsafe_hash=True)
class Reason:
    """The reason why a job waits. This class is not frozen, for the same reasons as `Wait`."""

    code: str
    message: str


Explanation = tuple[Reason, tuple[str, ...]]
"""The reason why a job waits, and the ids of the jobs that block it."""


class _Reach:
    """A set of nodes on which certain kinds of workers could run, the jobs that hold slots on these
    nodes, and the blocked jobs that could also use these nodes."""

    def __init__(self, node_kinds: int) -> None:
        self.node_kinds = node_kinds
        """The kinds of these nodes, as bits."""
        self.num_holders = 0
        """Number of holders whose slots on these nodes have been counted."""
        self.held_by: dict[str, int] = {}
        self.held = 0
        self.blocked: list[tuple[int, str]] = []
        """(position, job) of the first blocked jobs, in the order of the queue."""
        self.num_blocked = 0


class _Holding(NamedTuple):
    """The slots that a job holds."""

    job_id: str
    slices: Sequence[tuple[int, int]]
    """For each slice, the kind of the node as a bit, and the number of workers."""
    node_kinds: int
    """The kinds of all these nodes, as bits."""
    num_workers: int


Ahead = tuple[tuple[str, ...], int]
"""The first jobs that have reserved slots, and the total number of such jobs."""


class _Seen:
    """The obstacles for all gangs with equal requests, valid until the next job starts."""

    __slots__ = ("explanation", "free", "num_holders")

    def __init__(self, free: int, num_holders: int) -> None:
        self.free = free
        self.num_holders = num_holders
        self.explanation: Explanation | None = None
        """The reason why the gangs wait; set only if too few slots are free."""


class Obstacles:
    """Tracks the jobs that hold slots, and the blocked jobs that have reserved slots, while a plan
    is made."""

    def __init__(
        self,
        kinds: NodeKinds,
        holders: Sequence[Holder],
        free: Pool,
        nodes: Sequence[Node],
        reserved_by: Callable[[Fence, int], str],
    ) -> None:
        """`reserved_by` returns a phrase with the reservations of a fence that include some of the
        given cells."""
        self._reserved_by = reserved_by
        self._nodes = nodes
        self._kinds = kinds
        stuck = (node.id for node in nodes if any(node.quarantined.values()))
        self._stuck = self._kinds_of(stuck)
        """The kinds of nodes with quarantined slots, as bits."""
        self._withheld = [
            (self._kinds.bit_of(node.id), node.withheld[0], node.withheld[1:], node.is_tested)
            for node in nodes
            if node.withheld
        ]
        """The kind, the host name, and the withheld resources of each node with a fault or a
        self-test, and whether it only has a self-test."""
        self._free = free
        self._holders: list[_Holding] = []
        self._names: set[str] = set()
        """The jobs that hold slots."""
        for holder in holders:
            self.hold(holder.job_id, holder.slices)
        self._num_blocked = 0
        self._reaches: dict[int, _Reach] = {}
        self._blocked: list[_Reach] = []
        """The instances with blocked jobs."""
        self._reach_of: dict[WorkerKind, _Reach] = {}
        self._first_ahead: dict[_Reach, tuple[int, tuple[str, ...]]] = {}
        """The number of jobs ahead, and the first of them."""
        self._seen: dict[Gang, _Seen] = {}

    def hold(self, job_id: str, slices: tuple[Slice, ...]) -> None:
        there = [
            (self._kinds.bit_of(part.node_id), part.num_workers)
            for part in slices
            if part.node_id in self._kinds.of_node
        ]
        kinds = functools.reduce(operator.or_, (bit for bit, _ in there), 0)
        self._holders.append(_Holding(job_id, there, kinds, sum(number for _, number in there)))
        self._names.add(job_id)

    def _kinds_of(self, nodes: Iterable[str]) -> int:
        return functools.reduce(operator.or_, map(self._kinds.bit_of, nodes), 0)

    def block(self, job_id: str, kind: WorkerKind) -> None:
        """Record that the job has reserved slots."""
        reach = self._reach_of.get(kind) or self._reach(kind)
        if not reach.num_blocked:
            self._blocked.append(reach)
        reach.num_blocked += 1
        if len(reach.blocked) < MAX_NAMED:
            reach.blocked.append((self._num_blocked, job_id))
        self._num_blocked += 1

    def ahead(self, kind: WorkerKind) -> Ahead:
        """Return the jobs that have reserved slots on nodes on which such workers could run."""
        return self._ahead(self._reach_of.get(kind) or self._reach(kind))

    def ahead_of(self, gang: Gang) -> Ahead | None:
        """Return the jobs ahead of a gang if enough slots are free for the gang; None if too few
        slots are free."""
        return self.ahead(gang.kind) if self._look(gang).free >= gang.least else None

    def why_waiting(self, job_id: str, gang: Gang, ahead: Ahead | None) -> Explanation:
        """Return the reason why the gang does not start, and the jobs that block it."""
        seen = self._look(gang)
        if ahead is not None and seen.free >= gang.least:
            return self._behind(gang.needs, ahead, seen.free)
        if job_id in self._names and job_id in self._counted(gang.kind).held_by:
            return self.why(gang.needs, job_id, gang.kind, gang.least, ahead, seen.free)
        if seen.explanation is None:
            seen.explanation = self.why(gang.needs, job_id, gang.kind, gang.least, None, seen.free)
        return seen.explanation

    def _look(self, gang: Gang) -> _Seen:
        seen = self._seen.get(gang)
        if seen is None or seen.num_holders != len(self._holders):
            seen = _Seen(self._free.capacity(gang.kind), len(self._holders))
            self._seen[gang] = seen
        return seen

    def why(
        self,
        sentence: str,
        job_id: str,
        kind: WorkerKind,
        least: int,
        ahead: Ahead | None,
        free: int,
        *,
        runs: bool = False,
    ) -> Explanation:
        """Return the reason why `least` workers are not available, and the jobs that block them.
        `free` is the number of workers that fit at the same time, including the job's own workers
        if `runs` is set."""
        if free >= least and ahead is not None:
            return self._behind(sentence, ahead, free)
        if (reserved := self._reserved(sentence, kind, least, free)) is not None:
            return reserved, ()
        reach = self._counted(kind)
        own = reach.held_by.get(job_id, 0)
        others = len(reach.held_by) - (job_id in reach.held_by)
        named = itertools.islice((name for name in reach.held_by if name != job_id), MAX_NAMED)
        code, there = "waiting_for_slots", f"{free} {_is(free)} free"
        if kind.required is not None and (total := self._free.total(kind)) >= least:
            code = "waiting_for_domain"
            there = f"{total} {_is(total)} free, but {self._together(kind, free, not runs)}"
        if kind.is_whole:
            there = "the free slots do not have room for all ranks"
        elif closed := self._free.closed(kind):
            there += f" ({closed} more on nodes with a silo's data are reserved for ranks of silos)"
        message, in_the_way = f"{sentence}; {there}", tuple(named)
        if others:
            verb, held = "holds" if others == 1 else "hold", reach.held - own
            slots = "1 slot" if held == 1 else f"{held} slots"
            message += f", and {jobs(in_the_way, others)} {verb} {slots} on suitable nodes"
            message += self._faults(reach, kind)
        elif not reach.node_kinds:
            message = f"{sentence}; none of the accepted nodes could run a worker"
        elif faults := self._faults(reach, kind):
            message += faults
        elif reach.node_kinds & self._stuck:
            message += ", and some of the other slots are in quarantine"
        elif self._kinds.whole(kind) > own:
            message += ", and other programs use the rest of the cluster"
        else:
            message += ", and the job already holds all suitable slots of the cluster"
        return Reason(code, message), in_the_way

    def _faults(self, reach: _Reach, kind: WorkerKind) -> str:
        """Return clauses that name the suitable nodes on which a fault or a self-test withholds
        resources that such workers need; an empty string if there are none."""
        needed = {name for name, _ in kind.counted}
        faulty, tested = set[str](), set[str]()
        for bit, host, names, is_tested in self._withheld:
            if bit & reach.node_kinds and needed.intersection(names):
                (tested if is_tested else faulty).add(host)
        found = ""
        if faulty:
            them = "it" if len(faulty) == 1 else "them"
            found += (
                f"; {_no_new_work(faulty)} because of a fault until an admin releases {them} "
                "(see `dray cluster`)"
            )
        if tested:
            ends = "its self-test is" if len(tested) == 1 else "their self-tests are"
            found += f"; {_no_new_work(tested)} until {ends} done"
        return found

    def _reserved(self, sentence: str, kind: WorkerKind, least: int, free: int) -> Reason | None:
        """Return the reason if `least` workers are not available because of reservations: without
        the reservations, enough slots would be free, or the nodes that are not reserved are too
        small."""
        fence = kind.fence
        if fence is None:
            return None
        more, cells = self._free.reserved(kind)
        whole, there = self._kinds.whole(kind), f"{sentence}; {free} {_is(free)} free"
        if fence.own is None:
            would_fit = self._free.capacity(kind.anywhere) >= least
        else:
            would_fit = free + more >= least
            total = whole + self._kinds.whole_by_cell(kind.anywhere).within(fence.reserved)
            if total < least:
                why = f"the reservation's nodes have room for {total}"
                return Reason("waiting_for_slots", f"{sentence}; {why}")
        if would_fit and not kind.is_whole:
            by = self._reserved_by(fence, cells)
            return Reason(RESERVED, f"{there}, and {more} more {_is(more)} reserved: {by}")
        if would_fit or whole < least:
            by = self._reserved_by(fence, fence.reserved)
            return Reason(RESERVED, f"{there}, and other nodes are reserved: {by}")
        return None

    def _behind(self, sentence: str, ahead: Ahead, free: int) -> Explanation:
        names, number = ahead
        message = (
            f"{sentence}; {free} {_is(free)} free, but {jobs(names, number)} "
            f"{'comes' if number == 1 else 'come'} first and could use the same slots"
        )
        return Reason("behind_in_queue", message), names

    def _together(self, kind: WorkerKind, free: int, is_new: bool) -> str:
        """Describe the free slots in one domain. `is_new` is set if the group has no running
        workers, so that it could use any domain."""
        assert kind.required is not None
        level, capacities = kind.required.level, self._free.capacities(kind)
        number = f"only {free}" if free else "none"
        if not is_new:
            return f"{number} within its {level}"
        where = f" ({name_of(largest(capacities))})" if free else ""
        return f"{number} within one {level}{where}"

    def _counted(self, kind: WorkerKind) -> _Reach:
        """Return the `_Reach` of this kind, updated with the newest holders."""
        reach = self._reach(kind)
        if reach.num_holders == len(self._holders):
            return reach
        for name, slices, kinds, number in itertools.islice(self._holders, reach.num_holders, None):
            within = kinds & reach.node_kinds
            if not within:
                continue
            if within != kinds:
                number = sum([more for bit, more in slices if bit & within])
            reach.held_by[name] = reach.held_by.get(name, 0) + number
            reach.held += number
        reach.num_holders = len(self._holders)
        return reach

    def _reach(self, kind: WorkerKind) -> _Reach:
        reach = self._reach_of.get(kind)
        if reach is None:
            node_kinds = self._suitable(kind)
            reach = self._reaches.get(node_kinds)
            if reach is None:
                reach = self._reaches[node_kinds] = _Reach(node_kinds)
            self._reach_of[kind] = reach
        return reach

    def _suitable(self, kind: WorkerKind) -> int:
        """Return the kinds of nodes on which a worker could run if they were empty, as bits."""
        if kind.heterogeneous is None:
            return self._kinds.suitable(kind)
        bundles = [bundle for _, bundle in kind.heterogeneous.runs]
        could = (n for n in self._nodes if any(fits(bundle, n.total) for bundle in bundles))
        return self._kinds_of(node.id for node in could)

    def _ahead(self, reach: _Reach) -> Ahead:
        """Return the first blocked jobs that have reserved slots on these nodes, and their total
        number."""
        rivals = [each for each in self._blocked if each.node_kinds & reach.node_kinds]
        number = sum([rival.num_blocked for rival in rivals])
        before, first = self._first_ahead.get(reach, (-1, ()))
        if number != before and len(first) < MAX_NAMED:
            named = sorted(itertools.chain.from_iterable(rival.blocked for rival in rivals))
            first = tuple([job_id for _, job_id in named[:MAX_NAMED]])
            self._first_ahead[reach] = number, first
        return first, number


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def jobs(names: Sequence[str], number: int | None = None) -> str:
    """Return a string such as `jobs a, b, c and 7 more`. `number` is the total number of jobs, if
    not all are in `names`."""
    number = len(names) if number is None else number
    shown = ", ".join(names[:3])
    more = f" and {number - 3} more" if number > 3 else ""
    return f"{'job' if number == 1 else 'jobs'} {shown}{more}"


def _no_new_work(hosts: Collection[str]) -> str:
    shown = sorted(hosts)[:3] + ([f"{len(hosts) - 3} more"] if len(hosts) > 3 else [])
    nodes, get = ("node", "gets") if len(hosts) == 1 else ("nodes", "get")
    return f"{nodes} {', '.join(shown)} {get} no new work"
