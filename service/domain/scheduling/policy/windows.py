"""The effect of reservations on one plan: the nodes that each job can't use, and the running jobs
that leave reserved nodes.

A job can't use a node if the node is reserved for other jobs at any time between now and the time
at which the job is certain to have ended. The time at which a job is certain to have ended depends
on the job's limit and, for a job that saves its state on request, on the time at which the job is
asked to leave. These nodes form the job's fence (`slots.Fence`): workers don't fit on them, and all
rules about free, promised and reserved slots apply.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import NamedTuple, TypeVar

from ray_workers.shared.slices import Slice
from service.config.node_types import CELL
from service.domain.scheduling.placement.slots import (
    Fence,
    Node,
    Request,
    count,
    held_by_node,
    is_open,
)
from service.domain.scheduling.policy.cells import ByTime, Cells, Claims, bits, union
from service.domain.scheduling.policy.records import Growing, Snapshot, WaitingJob
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.order import SETTLING_S
from service.domain.scheduling.rules.reservations import (
    RESERVED,
    WAITING_FOR_RESERVATION,
    Claimant,
    Reservation,
    ends_in_time,
    seconds_left,
    why_not_yet,
)

SHRINKING_S = 150.0
"""Seconds before a job would have to leave a node at which a group is asked to release only its
slots on this node. The group has 120 s to respond."""


MAX_SHOWN = 2
"""Maximum number of reservations in a message."""


Job = TypeVar("Job", WaitingJob, RunningJob, Growing)


class Leaving(NamedTuple):
    """A running job that must release slots because of a reservation."""

    job: RunningJob
    slices: tuple[Slice, ...]
    """All slots of the job, or the slots without which it can continue."""
    reason: Reason
    ends: bool = False
    """Whether the job is cancelled."""


class Windows:
    """The reservations that have not ended at the time of a plan."""

    def __init__(self, snapshot: Snapshot, now: datetime) -> None:
        self._snapshot = snapshot
        self._now = now
        self._all = sorted(
            (each for each in snapshot.reservations if each.ends_at > now),
            key=lambda each: (each.begins_at, each.name),
        )
        self._named = {each.name: each for each in self._all}
        self._windows = sorted(self._all, key=lambda each: each.at_begin != "preempt")
        """The reservations whose jobs are preempted, then the other reservations, each in the order
        in which they begin. An integer stands for a set of reservations: its bits have the same
        order."""
        numbered = list(enumerate(self._windows))
        soft = [each for each in numbered if each[1].at_begin == "preempt"]
        self._soft = ByTime((_begins_in_s(each, now), at) for at, each in soft)
        self._hard = ByTime((_begins_in_s(each, now), at) for at, each in numbered[len(soft) :])
        self._ends = ByTime((seconds_left(each, now), at) for at, each in numbered)
        ending = (each for each in numbered if each[1].at_end == "preempt")
        self._ending = ByTime((seconds_left(each, now), at) for at, each in ending)
        self._claims = Claims(self._windows)
        self._fence_of: dict[tuple[int, str | None, tuple[int, int]], Fence | None] = {}
        self._fences: dict[tuple[int, str | None], Fence] = {}
        self._requests: dict[tuple[int, Fence], tuple[Request, Request]] = {}
        """Fenced requests, keyed by the `id()` of a request, which is kept alive."""

    @cached_property
    def _ids(self) -> frozenset[str]:
        return frozenset(node.id for node in self._nodes)

    @cached_property
    def _nodes(self) -> list[Node]:
        return [*self._snapshot.nodes, *self._snapshot.to_come]

    @cached_property
    def _nodes_of(self) -> Mapping[str, frozenset[str]]:
        """The nodes of each reservation."""
        return {
            each.name: each.node_ids & self._ids
            if not (each.all_nodes or each.labels)
            else frozenset(node.id for node in self._nodes if each.holds(node))
            for each in self._all
        }

    @cached_property
    def _cells(self) -> Cells:
        return Cells(self._ids, [self._nodes_of[each.name] for each in self._windows])

    def apply(self) -> Snapshot:
        """Return the snapshot with fences in the requests of waiting jobs, of groups that could
        grow, and of jobs whose size is chosen, and with cells in the nodes."""
        snapshot = self._snapshot
        if not self._all and not any(job.reservation is not None for job in snapshot.queue):
            return snapshot
        queue = tuple(self._waiting(job) for job in snapshot.queue)
        running = {job.job_id: job for job in snapshot.running}
        growing = tuple(self._growing(group, running) for group in snapshot.growing)
        sized = tuple(
            self._sized(job) if job.job_id in snapshot.elastic else job for job in snapshot.running
        )
        return replace(
            snapshot,
            queue=queue,
            growing=growing,
            running=sized,
            nodes=self.mark(snapshot.nodes),
            to_come=self.mark(snapshot.to_come),
        )

    def mark(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return the nodes with their cells (`CELL`)."""
        cell_of = self._cells.of_node if self._fences else {}
        return tuple(
            replace(
                node,
                total={**node.total, CELL: float(cell)},
                available_to_us={**node.available_to_us, CELL: float(cell)},
            )
            if (cell := cell_of.get(node.id))
            else node
            for node in nodes
        )

    def lendable(self) -> list[Node]:
        """Return the nodes that the jobs of every queue can use now, with the resources that other
        programs don't hold. Nodes of silos, and nodes in reservations that have begun, are
        excluded."""
        begun = [self._nodes_of[e.name] for e in self._all if e.begins_at <= self._now]
        reserved = frozenset[str]().union(*begun)
        held = held_by_node(self._snapshot.holders)
        nodes = (node for node in self._snapshot.nodes if node.accepted)
        usable = [_without_others(node, held.get(node.id, {})) for node in nodes]
        return [
            node
            for node in (*usable, *self._snapshot.to_come)
            if is_open(node.total) and node.id not in reserved
        ]

    def _waiting(self, job: WaitingJob) -> WaitingJob:
        stays_s = _would_stay_s(job)
        least_s = self._least_s(stays_s, yields=job.yields)
        why = why_not_yet(job, job.attempt > 0, self._named, self._now, least_s)
        if why is not None:
            return replace(job, not_yet=Reason(WAITING_FOR_RESERVATION, why))
        return self._fenced(job, self._fence(job, stays_s, yields=job.yields))

    def _sized(self, job: RunningJob) -> RunningJob:
        fence = self._fence(job, _stays_s(job), yields=job.yields)  # as if it waited
        return self._fenced(job, fence)

    def _growing(self, group: Growing, running: Mapping[str, RunningJob]) -> Growing:
        job, choice = running.get(group.job_id), self._snapshot.elastic.get(group.job_id)
        # The group can release the new slots, without stopping, before a reservation begins.
        yields = job is not None and job.yields and choice is not None and choice.in_place
        fence = None if job is None else self._fence(job, _stays_s(job), yields=yields)
        return self._fenced(group, fence)

    def _fenced(self, job: Job, fence: Fence | None) -> Job:
        """Return the job with the fence. Equal requests of several jobs stay the same instance."""
        if fence is None:
            return job
        key = id(job.request), fence
        if key not in self._requests:
            self._requests[key] = job.request, replace(job.request, fence=fence)
        return replace(job, request=self._requests[key][1])

    def _least_s(self, stays_s: float, *, yields: bool) -> float:
        """Return the latest start of a job, in seconds before the end of its reservation, if the
        job is asked to leave at this end."""
        trains_s = min(stays_s, self._snapshot.min_run_s) if yields else 0.0
        return self._snapshot.leave_s + trains_s

    def _fence(self, job: Claimant, stays_s: float, *, yields: bool = False) -> Fence | None:
        """Return the nodes that a job can't use if it could run for `stays_s`; None if it can use
        all nodes. `yields` is set if it can also be asked to leave before a reservation begins."""
        admitting = self._claims.admitting(job)
        if admitting:
            admitting &= ~self._ending.until(self._least_s(stays_s, yields=yields))
        bound = None if job.reservation is None else self._named.get(job.reservation)
        own = None if bound is None or bound.flex else bound.name
        key = admitting, own, self._begun(stays_s, yields=yields)
        if key not in self._fence_of:
            self._fence_of[key] = self._new_fence(*key)
        return self._fence_of[key]

    def _begun(self, stays_s: float, *, yields: bool, in_s: float = 0.0) -> tuple[int, int]:
        """For a job that starts after `in_s` seconds, return the reservations that begin before the
        job is certain to have left its nodes: the reservations whose jobs are preempted, and the
        others."""
        lead_s = self._snapshot.leave_s
        hard_s = stays_s + lead_s
        soft_s = min(hard_s, lead_s + self._snapshot.min_run_s) if yields else hard_s
        return self._soft.before(in_s + soft_s), self._hard.before(in_s + hard_s)

    def closed_in(self, job: WaitingJob, in_s: float) -> frozenset[str]:
        """Return the nodes that the job can use now, but not if it started after `in_s` seconds."""
        begun = self._begun(_would_stay_s(job), yields=job.yields, in_s=in_s)
        not_for_it = self._ends.until(in_s) | self._claims.admitting(job)
        cells = self._cells.reserved(begun, not_for_it)
        return self._cells.nodes_in(cells & ~(job.request.fence.closed if job.request.fence else 0))

    def _new_fence(self, admitting: int, own: str | None, begun: tuple[int, int]) -> Fence | None:
        """Return the fence of a job that can use the reservations in `admitting`, and that may
        still run when the reservations in `begun` begin."""
        cells = self._cells
        reserved, within = cells.reserved(begun, admitting), cells.all
        if own is not None:
            within = cells.of_window[self._windows.index(self._named[own])]
            reserved &= within
        if not reserved and own is None:
            return None
        windows = union(begun) & ~admitting & cells.windows_in(within)
        key = windows, own
        if key not in self._fences:
            closed = reserved | (cells.all & ~within)
            self._fences[key] = Fence(closed, reserved, windows, cells.nodes, own)
        return self._fences[key]

    def spoken(self, fence: Fence, cells: int) -> str:
        """Return a phrase with the reservations for other jobs that include some of these cells;
        empty if there are none."""
        if fence.own is not None:
            cells &= fence.reserved
        there = self._cells.windows_in(cells) & fence.windows
        first = itertools.islice(bits(there), MAX_SHOWN)
        shown = ", and ".join([self._windows[at].spoken for at in first])
        more = there.bit_count() - MAX_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

    def leaving(self) -> list[Leaving]:
        """Return the running jobs that must release slots now: if a reservation is about to begin,
        the jobs that it does not admit; if it is about to end, its own jobs."""
        found: dict[str, Leaving] = {}
        on_nodes: dict[str, list[RunningJob]] | None = None
        for each in self._all:
            left_s = _begins_in_s(each, self._now) - self._snapshot.leave_s
            if left_s > SHRINKING_S:
                break
            if on_nodes is None:
                on_nodes = _on_nodes(self._snapshot.running)
            for job in self._on(each, on_nodes):
                if job.job_id not in found and (leaving := self._leaves(job, each, left_s)):
                    found[job.job_id] = leaving
        return list(found.values())

    def _on(
        self, reservation: Reservation, on_nodes: Mapping[str, Sequence[RunningJob]]
    ) -> Iterable[RunningJob]:
        """Return the jobs on the reservation's nodes that were not asked to leave."""
        nodes = sorted(self._nodes_of[reservation.name])
        return {job.job_id: job for n in nodes for job in on_nodes.get(n, ())}.values()

    def _leaves(self, job: RunningJob, each: Reservation, left_s: float) -> Leaving | None:
        if each.admits(job):
            stays = seconds_left(each, self._now) > self._snapshot.leave_s
            if each.at_end == "continue" or stays:
                return None
            message = f"releases its slots, because {each.spoken} ends"
            return Leaving(job, job.slices, Reason(RESERVED, message))
        if each.at_begin == "wait" or ends_in_time(each.begins_at, self._now, job.ends_within_s):
            return None
        if left_s <= 0:
            ends, verb = each.at_begin == "cancel", "releases its slots"
            verb = "is cancelled" if ends else verb
            reason = Reason(RESERVED, f"{verb}, because {each.spoken} includes its nodes")
            return Leaving(job, job.slices, reason, ends)
        there = self._nodes_of[each.name]
        inside = tuple(part for part in job.slices if part.node_id in there)
        left = count(job.slices) - count(inside)
        is_spare = all(part in job.spare for part in inside)
        if job.recalled or not is_spare or job.request.rounded_down(left) != left:
            return None
        message = f"continues with fewer workers, because {each.spoken} includes some of its nodes"
        return Leaving(job, inside, Reason(RESERVED, message))


def _without_others(node: Node, held: Mapping[str, float]) -> Node:
    """Return the node with only the resources that are free or held by dray's jobs."""
    usable = {
        name: min(most, held.get(name, 0.0) + node.available_to_us.get(name, 0.0))
        for name, most in node.total.items()
    }
    return replace(node, total=usable)


def _would_stay_s(job: WaitingJob) -> float:
    return math.inf if job.ends_within_s is None else job.ends_within_s + SETTLING_S


def _stays_s(job: RunningJob) -> float:
    return math.inf if job.ends_within_s is None else job.ends_within_s


def _begins_in_s(reservation: Reservation, now: datetime) -> float:
    return (reservation.begins_at - now) / timedelta(seconds=1)


def _on_nodes(running: Iterable[RunningJob]) -> dict[str, list[RunningJob]]:
    """Return the running jobs on each node, except for jobs that were asked to leave."""
    found: dict[str, list[RunningJob]] = {}
    for job in running:
        if not job.is_leaving:
            for node_id in {part.node_id for part in job.slices}:
                found.setdefault(node_id, []).append(job)
    return found
