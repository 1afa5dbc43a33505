"""Reservations: nodes that are set aside from a begin to an end for some users, queues or projects,
or for no jobs (a maintenance window)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, Protocol

from service.config.node_types import label_resources
from service.domain.scheduling.placement.slots import Node, is_open
from service.domain.scheduling.rules.times import shown
from service.domain.scheduling.rules.tree import QueueTree

RESERVED = "reserved"
"""Code of the reason of a job whose slots are reserved for other jobs, and of the event of a job
that leaves reserved nodes."""
WAITING_FOR_RESERVATION = "waiting_for_reservation"
"""Code of the reason of a job that names a reservation in which it can't start now."""
LEAVING_S = 15.0
"""Seconds between the end of a job's grace period and the time at which its nodes must be free."""

NO_QUEUES = QueueTree(())
KEPT_FOR = timedelta(hours=1)

AtBegin = Literal["preempt", "wait", "cancel"]
AtEnd = Literal["continue", "preempt"]


class Claimant(Protocol):
    """The fields of a job that decide whether a reservation is for the job."""

    @property
    def owner(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def project(self) -> str: ...
    @property
    def reservation(self) -> str | None: ...


@dataclass(frozen=True)
class Reservation:
    """A reservation that has not ended."""

    name: str
    begins_at: datetime
    ends_at: datetime
    node_ids: frozenset[str] = frozenset()
    """The named nodes that exist, or the chosen nodes."""
    labels: tuple[str, ...] = ()
    """Labels as resources: the reservation includes each node that has all of them."""
    all_nodes: bool = False
    users: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    """The queues that may use the reservation, with the queues under them."""
    projects: tuple[str, ...] = ()
    accepts_unnamed: bool = False
    """Whether jobs that could name the reservation can use it without naming it."""
    flex: bool = False
    """Whether jobs that name the reservation can also start before it begins, and on other
    nodes."""
    at_begin: AtBegin = "preempt"
    """The effect on jobs of others that still run when the reservation begins."""
    at_end: AtEnd = "continue"
    """The effect on jobs of the reservation that still run when it ends."""

    @property
    def is_maintenance(self) -> bool:
        return not (self.users or self.queues or self.projects)

    def holds(self, node: Node) -> bool:
        if self.all_nodes or node.id in self.node_ids:
            return True
        return bool(self.labels) and all(label in node.total for label in self.labels)

    def is_for(self, owner: str, queue: str, project: str) -> bool:
        """Whether these jobs may name the reservation."""
        return owner in self.users or queue in self.queues or project in self.projects

    def admits(self, job: Claimant) -> bool:
        """Whether the job can use the reserved nodes."""
        named = job.reservation == self.name or (self.accepts_unnamed and job.reservation is None)
        return named and self.is_for(job.owner, job.queue, job.project)

    @property
    def spoken(self) -> str:
        kind = "maintenance window" if self.is_maintenance else "reservation"
        return f"the {kind} {self.name!r} from {shown(self.begins_at)} to {shown(self.ends_at)}"

    def overlaps(self, other: Reservation) -> bool:
        """Whether there is a time at which both reservations are in effect."""
        return self.begins_at < other.ends_at and other.begins_at < self.ends_at


@dataclass(frozen=True)
class ReservationRules:
    """A stored reservation. The fields of the same name in `Reservation` have the same meaning."""

    name: str
    begins_at: datetime
    ends_at: datetime
    users: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Hostnames or ids of nodes."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes; if a number is set, the labels of the nodes that can be chosen."""
    num_nodes: int | None = None
    num_gpus: int | None = None
    all_nodes: bool = False
    accepts_unnamed: bool = False
    flex: bool = False
    at_begin: AtBegin = "preempt"
    at_end: AtEnd = "continue"
    comment: str = ""
    created_by: str = ""
    chosen: tuple[str, ...] = ()
    """Ids of the nodes that were chosen, if a number is set."""

    @property
    def is_counted(self) -> bool:
        return self.num_nodes is not None or self.num_gpus is not None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(sorted(label_resources(self.node_labels)))

    def reservation(
        self, ids_of: Mapping[str, Collection[str]], tree: QueueTree = NO_QUEUES
    ) -> Reservation:
        """Return the reservation with only the nodes that exist; it also admits the queues under
        its queues. `ids_of` contains the ids of nodes, keyed by hostname and by id."""
        named = (node_id for name in self.nodes for node_id in ids_of.get(name, ()))
        return Reservation(
            name=self.name,
            begins_at=self.begins_at,
            ends_at=self.ends_at,
            node_ids=frozenset(self.chosen if self.is_counted else named),
            labels=() if self.is_counted else self.labels,
            all_nodes=self.all_nodes,
            users=self.users,
            queues=tuple(each for name in self.queues for each in tree.under(name)),
            projects=self.projects,
            accepts_unnamed=self.accepts_unnamed,
            flex=self.flex,
            at_begin=self.at_begin,
            at_end=self.at_end,
        )


def seconds_left(reservation: Reservation, now: datetime) -> float:
    return (reservation.ends_at - now) / timedelta(seconds=1)


def why_not_yet(
    job: Claimant,
    has_started: bool,
    named: Mapping[str, Reservation],
    now: datetime,
    least_s: float,
) -> str | None:
    """Return why a job that names a reservation can't start now, regardless of where slots are
    free; None if it can. `named` contains the reservations that have not ended. A job that has
    already started once continues without its reservation after the reservation has ended.
    `least_s` is the number of seconds for which the job must be able to keep its slots."""
    name = job.reservation
    if name is None:
        return None
    found = named.get(name)
    if found is None or found.ends_at <= now:
        gone = f"its reservation {name!r} has ended or was deleted"
        return None if has_started else gone
    if not found.is_for(job.owner, job.queue, job.project):
        return f"{found.spoken} is not for this job's user, queue or project"
    if found.begins_at > now and not found.flex:
        return f"waits for {found.spoken}"
    if not found.flex and found.at_end == "preempt" and seconds_left(found, now) <= least_s:
        return f"{found.spoken} ends too soon"
    return None


def choose(
    wishes: Sequence[ReservationRules],
    fixed: Sequence[Reservation],
    nodes: Sequence[Node],
    busy_until: Mapping[str, datetime],
) -> dict[str, tuple[str, ...]]:
    """Choose whole nodes for reservations that ask for a number of nodes or GPUs. Returns the ids
    of the nodes by reservation; fewer nodes than needed if there are not enough.

    Nodes that were chosen earlier are kept as long as they are in `nodes`. Among the other nodes,
    nodes whose jobs end before the reservation begins are preferred, followed by nodes whose jobs
    end earliest. `fixed` contains the other reservations, whose nodes are not chosen for the same
    time. `busy_until` contains the time at which the last job of a node ends; nodes without jobs
    are missing.
    """
    by_id = {node.id: node for node in nodes}
    taken: list[tuple[datetime, datetime, Collection[str]]] = [
        (each.begins_at, each.ends_at, {node.id for node in nodes if each.holds(node)})
        for each in fixed
    ]
    found: dict[str, tuple[str, ...]] = {}
    for wish in wishes:
        unavailable: set[str] = set()
        for begins_at, ends_at, some in taken:
            if begins_at < wish.ends_at and wish.begins_at < ends_at:
                unavailable.update(some)
        before = [n for n in wish.chosen if n in by_id and n not in unavailable]
        found[wish.name] = _enough(wish, before, by_id, unavailable, busy_until)
        taken.append((wish.begins_at, wish.ends_at, found[wish.name]))
    return found


def _enough(
    wish: ReservationRules,
    before: Iterable[str],
    by_id: Mapping[str, Node],
    unavailable: Collection[str],
    busy_until: Mapping[str, datetime],
) -> tuple[str, ...]:
    def order(node_id: str) -> tuple[datetime, str]:
        free_at = busy_until.get(node_id)
        return (wish.begins_at if free_at is None else max(free_at, wish.begins_at), node_id)

    kept = list(before)
    able = (node for node in by_id.values() if node.accepted and is_open(node.total))
    others = [n.id for n in able if n.id not in unavailable and n.id not in kept]
    left = wish.num_nodes if wish.num_nodes is not None else wish.num_gpus or 0
    found = []
    for node_id in [*kept, *sorted(others, key=order)]:
        node = by_id[node_id]
        gain = 1 if wish.num_nodes is not None else int(node.total.get("GPU", 0))
        if left <= 0:
            break
        if gain and all(label in node.total for label in wish.labels):
            found.append(node_id)
            left -= gain
    return tuple(sorted(found))


def ends_in_time(begins_at: datetime, now: datetime, ends_within_s: float | None) -> bool:
    """Whether a running job surely ends before the reservation begins, according to its limit."""
    left_s = (begins_at - now) / timedelta(seconds=1)
    return ends_within_s is not None and ends_within_s + LEAVING_S <= left_s


def moments(reservations: Iterable[Reservation], leave_s: float) -> Iterable[datetime]:
    """Return the times at which jobs may start or must leave because of reservations."""
    for each in reservations:
        lead = timedelta(seconds=leave_s)
        yield from (each.begins_at - lead, each.begins_at, each.ends_at - lead, each.ends_at)


def reserved_soon(
    reservations: Iterable[Reservation], nodes: Sequence[Node], now: datetime
) -> set[str]:
    """Return the nodes of each reservation for jobs that has begun or begins within `KEPT_FOR`.
    These nodes are not released while they are idle."""
    soon = [e for e in reservations if not e.is_maintenance and e.begins_at - KEPT_FOR <= now]
    return {node.id for node in nodes for each in soon if each.holds(node)}
