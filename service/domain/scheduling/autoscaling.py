"""Computes the request to Ray's autoscaler: a pure function of the plan, the nodes, and the node
types that the autoscaler can add.

Ray's `request_resources` sets a lower bound for the size of the cluster and ignores current usage:
a bundle counts as available if it would fit into the empty cluster. Therefore, the request contains
a bundle for every whole node that is in use or that a waiting job will use, and the bundles that
don't fit on any present node. If an autoscaler can't provide a part of a request, it may ignore the
entire request. Therefore, the request contains each gang either completely or not at all, and never
more than the node types allow.

Groups that wait for replacements of lost workers come first, followed by jobs that wait for slots,
in the order of the queue. Nothing is requested for a job that is held, blocked by a limit,
waiting for other jobs or bound to a reservation, nor for a job that will get slots that other jobs
are releasing. Reserved nodes don't count as free for other jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ray_workers.shared.slices import Slice, by_bundle
from service.config.node_types import LABEL_SHARE, OPEN, NodeType, label_resources
from service.domain.scheduling.placement.gangs import Gangs
from service.domain.scheduling.placement.phrases import amount_of
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.placement.slots import (
    ACCELERATOR_SHARE,
    WHOLE_GPUS,
    Kind,
    Node,
    Request,
    count,
    fits,
    fits_pinned,
    is_open,
)
from service.domain.scheduling.placement.stock import Stock, When
from service.domain.scheduling.placement.topology import Topology, name_of
from service.domain.scheduling.policy import Decision, Grow, Snapshot, Start, Stay, Wait
from service.domain.scheduling.rules.obstacles import PREPARING
from service.domain.scheduling.rules.reservations import RESERVED

WAITING_FOR_SLOTS = (
    "waiting_for_slots",
    "waiting_for_domain",
    "behind_in_queue",
    "waiting_for_nodes",
    RESERVED,
)
ABOUT_TO_START = (PREPARING, "backing_off")
"""No nodes are requested for a job that waits for one of these reasons. The nodes on which such
jobs may start are kept."""
COUNTED = ("CPU", "GPU")
"""Resources that identify a whole node in a request. Memory is not included, because a node never
has exactly the memory that its type promises."""


@dataclass(frozen=True)
class Demand:
    """The request to Ray. The request is empty if no new node would help a waiting job."""

    bundles: tuple[tuple[Kind, int], ...] = ()
    """The lower bound for the cluster's size: each bundle with its requested count."""
    num_nodes: int = 0
    """Number of nodes to add."""
    nodes_of: Mapping[str, int] = field(default_factory=dict)
    """Number of nodes to add for each job."""
    without_hope: frozenset[str] = frozenset()
    """Jobs for which the node types currently allow no additional nodes."""
    needed: frozenset[str] = frozenset()
    """Existing nodes that a job may use soon."""


NOTHING = Demand()


def memory_seen(
    types: Sequence[NodeType], came: Iterable[Node], before: Mapping[int, float]
) -> dict[int, float]:
    """Return the largest memory that any node of each type has had so far, keyed by the index of
    the type. came: new nodes. before: the result of the previous call."""
    most = dict(before)
    for node in came:
        number = _type_of(node, types)
        if number is not None and "memory" in types[number].resources:
            most[number] = max(most.get(number, 0.0), node.total["memory"])
    return most


def as_seen(types: Sequence[NodeType], most: Mapping[int, float]) -> tuple[NodeType, ...]:
    """Return the types with their memory limited to the memory that their nodes actually had.
    `most` is the result of `memory_seen`.

    A node has slightly less memory than its type promises. Without this limit, the autoscaler would
    add nodes for a worker that needs all of the promised memory, although the worker does not fit
    on these nodes.
    """
    return tuple(
        replace(each, resources={**each.resources, "memory": most[number]})
        if number in most and most[number] < each.resources["memory"]
        else each
        for number, each in enumerate(types)
    )


def may_come(types: Sequence[NodeType], nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes that can still be added, with ids that are not in use. nodes: all present
    nodes."""
    present = Counter(_type_of(node, types) for node in nodes)
    return tuple(
        Node(f"to-come:{number}:{index}", each.resources, each.resources)
        for number, each in enumerate(types)
        for index in range(each.most - present[number])
    )


def _type_of(node: Node, types: Sequence[NodeType]) -> int | None:
    """Return the index of the first type that has the node's `COUNTED` resources, and only
    resources that the node also has. For a silo's node, types for silos take precedence."""
    found = [
        number
        for number, each in enumerate(types)
        if all(name in node.total for name in each.resources if name not in COUNTED)
        and all(node.total.get(n, 0.0) == each.resources.get(n, 0.0) for n in COUNTED)
    ]
    kept = (n for n in found if is_open(types[n].resources) == is_open(node.total))
    return next(kept, found[0] if found else None)


def demand(
    snapshot: Snapshot,
    decisions: Sequence[Decision],
    present: Sequence[Node],
    to_come: Sequence[Node],
    in_use: Collection[str],
) -> Demand:
    """Return the demand after a plan. The snapshot and the nodes include the effects of
    reservations (`windows`).

    present: all nodes. Nodes that are refused or being drained are not `accepted`, but Ray still
    counts them as available. to_come: the result of `may_come`. in_use: ids of nodes on which
    anything runs, including other programs.
    """
    asking = _Asking(snapshot, present, to_come)
    for decision in decisions:
        if isinstance(decision, Start | Grow):
            asking.take(decision.job_id, decision.slices)
            asking.stays |= {part.node_id for part in decision.slices}
    lacking = {group.job_id for group in snapshot.growing if group.lacking}
    for decision in decisions:
        if isinstance(decision, Stay) and decision.job_id in lacking:
            asking.consider(decision)
    for decision in decisions:
        if isinstance(decision, Wait):
            asking.consider(decision)
    return asking.answer(present, in_use)


class _Asking:
    """Tracks the remaining resources while a demand is computed."""

    def __init__(
        self, snapshot: Snapshot, present: Sequence[Node], to_come: Sequence[Node]
    ) -> None:
        self._requests = {job.job_id: job.request for job in snapshot.queue}
        self._requests |= {group.job_id: group.request for group in snapshot.growing}
        self._num_workers = {job_id: each.least for job_id, each in self._requests.items()}
        self._num_workers |= {group.job_id: group.lacking for group in snapshot.growing}
        """Minimum number of workers that each job or group requests, keyed by job id."""
        self._usable = [node for node in present if node.accepted]
        self._gangs = Gangs({})
        for request in self._requests.values():
            self._gangs.of(request)
        self._gangs.name_all(
            shares_gpus=any(WHOLE_GPUS in node.available_to_us for node in present),
            has_closed=any(OPEN in node.total for node in (*present, *to_come)),
        )
        self._topology = Topology(snapshot.topology, [*self._usable, *to_come])
        self._present = Stock(self._usable, self._gangs, self._topology, snapshot.holders)
        self._to_come = Stock(to_come, self._gangs, self._topology)
        self._free, self._new = Pool(self._present, When.FREE), Pool(self._to_come, When.FREE)
        self._bundles: Counter[Kind] = Counter()
        self._nodes: set[str] = set()
        self._nodes_of: dict[str, int] = {}
        self._without_hope: set[str] = set()
        self._needed: set[str] = set()
        """Nodes that will be used by jobs that wait for slots."""
        self.stays: set[str] = set()
        """Nodes that will be used by jobs that don't wait for slots."""

    def take(self, job_id: str, slices: Sequence[Slice]) -> None:
        self._present.take(job_id, self._gangs.of(self._requests[job_id]).kind, slices)

    def consider(self, wait: Wait | Stay) -> None:
        request = self._requests[wait.job_id]
        if wait.reason.code in ABOUT_TO_START:
            bundles = [bundle for _, bundle in request.runs]
            fit = fits_pinned if request.homes else fits
            self.stays |= {n.id for n in self._usable if any(fit(b, n.total) for b in bundles)}
        elif request.fence is not None and request.is_bound:
            self._needed |= {node.id for node in self._usable} - request.fence.nodes
        elif wait.reason.code in WAITING_FOR_SLOTS:
            self._ask(wait.job_id, request)

    def _ask(self, job_id: str, request: Request) -> None:
        """Request the slots that are missing for the gang's minimum size, unless the node types
        can't provide them."""
        kind, least = self._gangs.of(request).kind, self._num_workers[job_id]
        if request.roles:
            self._ask_for_whole(job_id, request)
            return
        free, new = self._free.capacities(kind), self._new.capacities(kind)
        lacking = {place: max(0, least - free.get(place, 0)) for place in (*free, *new)}
        could = [place for place, number in lacking.items() if number <= new.get(place, 0)]
        if not could:
            self._without_hope.add(job_id)
            return
        place = min(could, key=lambda each: (lacking[each], name_of(each)))
        slices = self._free.pack_within(kind, least - lacking[place], place)
        more = self._new.pack_within(kind, lacking[place], place)
        self.take(job_id, slices)
        self._needed |= {part.node_id for part in slices}
        if more:
            self._to_come.take(job_id, kind, more)
            labels = dict.fromkeys(label_resources(self._topology.labels_of(place)), LABEL_SHARE)
            self._bundles[replace(request, bundle={**request.bundle, **labels}).kind] += count(more)
            self._nodes |= {part.node_id for part in more}
            self._nodes_of[job_id] = len(more)

    def _ask_for_whole(self, job_id: str, request: Request) -> None:
        """Request new nodes for a complete gang of heterogeneous slots."""
        kind = self._gangs.of(request).kind
        more = self._new.pack_most(kind, request.least, request.least)
        if not more:
            self._without_hope.add(job_id)
            return
        self._to_come.take(job_id, kind, more)
        for part, bundle in by_bundle(more, request.bundle, request.roles):
            self._bundles[tuple(sorted(bundle.items()))] += part.num_workers
        self._nodes |= {part.node_id for part in more}
        self._nodes_of[job_id] = len({part.node_id for part in more})

    def answer(self, present: Sequence[Node], in_use: Collection[str]) -> Demand:
        """Return the demand. The demand includes all nodes that are in use, needed, refused or
        withheld, so that Ray starts the new nodes in addition to these nodes."""
        needed = self._needed | self.stays
        used = needed.union(in_use)
        kept = [n for n in present if n.id in used or not n.accepted or n.withheld]
        is_asking = bool(self._bundles or self._needed)
        whole = Counter(_whole(node) for node in kept if is_asking)
        del whole[()]
        return Demand(
            bundles=tuple(sorted((whole + self._bundles).items())),
            num_nodes=len(self._nodes),
            nodes_of=self._nodes_of,
            without_hope=frozenset(self._without_hope),
            needed=frozenset(needed),
        )


def _whole(node: Node) -> Kind:
    """Return the bundle that fits only on an empty node of this size."""
    counted = {name: amount for name in COUNTED if (amount := node.total.get(name, 0.0))}
    kinds = {n: ACCELERATOR_SHARE for n in node.total if n.startswith("accelerator_type:")}
    return tuple(sorted((counted | kinds).items())) if counted else ()


def sentence(num_nodes: int, at: datetime) -> str:
    """Return a sentence such as `Ray was asked for 2 more nodes at 14:03:07 UTC`."""
    nodes = "1 more node" if num_nodes == 1 else f"{num_nodes} more nodes"
    return f"Ray was asked for {nodes} at {at:%H:%M:%S} UTC"


def why_too_small(
    request: Request, promised: Sequence[NodeType], real: Sequence[NodeType]
) -> str | None:
    """Return a message if no nodes are requested because nodes had less memory than their type
    promises, and too little for a worker. Otherwise, return None."""
    found = None
    for each, came in zip(promised, real, strict=True):
        if fits(request.bundle, came.resources):
            return None
        if fits(request.bundle, each.resources):
            counted = [amount_of(n, came.resources[n]) for n in COUNTED if came.resources.get(n)]
            has, promises = (amount_of("memory", of.resources["memory"]) for of in (came, each))
            found = (
                f"no nodes are requested: nodes with {', '.join(counted)} have only {has}, but "
                f"DRAY_AUTOSCALE_NODES specifies {promises}"
            )
    return found
