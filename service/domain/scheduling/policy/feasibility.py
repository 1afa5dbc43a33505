"""Checks whether a gang could run on empty nodes, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_workers.shared.slices import RoleSlots
from service.config.node_types import LABEL, OPEN
from service.domain.scheduling.placement.gangs import Gang
from service.domain.scheduling.placement.heterogeneous import never_fits
from service.domain.scheduling.placement.node_kinds import NodeKinds
from service.domain.scheduling.placement.phrases import (
    distinct_amounts,
    needs,
    number_of_nodes,
    spoken_bundle,
    spoken_ranks,
    workers,
)
from service.domain.scheduling.placement.pinned_nodes import place_pinned
from service.domain.scheduling.placement.slots import (
    EPSILON,
    Node,
    Request,
    fits,
    fits_pinned,
    is_open,
    is_part_of_gpu,
)
from service.domain.scheduling.placement.topology import Topology, largest, name_of
from service.domain.scheduling.rules.obstacles import Reason

ALL_CLOSED = "every node of the cluster has a silo's data, and accepts only ranks of silos"
OPEN_ARE_REFUSED = "waits for a node: dray refuses every node without a silo's data"


def can_ever_fit(
    request: Request, nodes: Sequence[Node], topology: Topology | None = None
) -> Reason | None:
    """Return why the accepted nodes could not run the gang even if they were empty; None if they
    could run it. `topology` can contain additional nodes."""
    if _surely_fits(request, nodes):
        return None
    accepted = [node for node in nodes if node.accepted]
    reason = _why_not_on(request, accepted, topology)
    if reason is None or len(accepted) == len(nodes):
        return reason
    kept = len(nodes) - len(accepted)
    verbs = "is not accepted does not" if kept == 1 else "are not accepted do not"
    return _unsatisfiable(f"{reason.message} ({number_of_nodes(kept)} that {verbs} count)")


def _surely_fits(request: Request, nodes: Sequence[Node]) -> bool:
    """Whether a check of a few nodes is enough to be certain that the gang fits."""
    if request.homes or request.roles or request.required_level is not None:
        return False
    left = request.least
    for node in nodes:
        if node.accepted:
            left -= fits(request.bundle, node.total)
        if left <= 0:
            return True
    return False


class Feasibility:
    """Whether gangs could run on the nodes of a plan if these were empty."""

    def __init__(self, nodes: Sequence[Node], to_come: Sequence[Node], kinds: NodeKinds) -> None:
        """`stock` contains `nodes`, and its topology also contains the nodes to come."""
        self._nodes = nodes
        self._to_come = to_come
        self._kinds = kinds
        self._possible: set[Gang] = set()
        self._impossible: dict[Gang, Reason] = {}
        self._too_large: dict[Gang, Reason | None] = {}

    def why_never(self, gang: Gang) -> Reason | None:
        """Return why the gang can't run even with the nodes to come; None if it could."""
        if gang in self._possible:
            return None
        reason = self._impossible.get(gang)
        # Reservations end, so look at all nodes.
        if reason is None and self._kinds.whole(gang.kind.anywhere) < gang.least:
            nodes = [*self._nodes, *self._to_come]
            reason = can_ever_fit(gang.request, nodes, self._kinds.topology)
        if reason is None:
            self._possible.add(gang)
        else:
            self._impossible[gang] = reason
        return reason

    def why_not_now(self, gang: Gang) -> Reason | None:
        """Return why the gang can't run on the current nodes; None if it could."""
        if self._kinds.whole(gang.kind) >= gang.least:
            return None
        if gang not in self._too_large:
            reason = can_ever_fit(gang.request, self._nodes, self._kinds.topology)
            if reason is not None:
                why = reason.message if self._nodes else "the cluster has no usable node"
                message = f"{gang.needs}, and waits for nodes: {why}"
                reason = Reason("waiting_for_nodes", message)
            self._too_large[gang] = reason
        return self._too_large[gang]


def _why_not_on(
    request: Request, accepted: Sequence[Node], topology: Topology | None
) -> Reason | None:
    if request.homes:
        return _why_unplaceable(request, accepted)
    usable = [node for node in accepted if is_open(node.total)]
    reason = _why_never(request, usable, topology)
    if reason is None or len(usable) == len(accepted):
        return reason
    if not usable:
        return _unsatisfiable(ALL_CLOSED)
    opened = [replace(node, total={**node.total, OPEN: math.inf}) for node in accepted]
    if _why_never(request, opened, topology) == reason:
        return reason
    kept = number_of_nodes(len(accepted) - len(usable))
    verb = "accepts" if len(accepted) - len(usable) == 1 else "accept"
    silos = f"{kept} with a silo's data, which {verb} only ranks of silos"
    return _unsatisfiable(f"{reason.message}, apart from {silos}")


def _why_never(
    request: Request, usable: Sequence[Node], topology: Topology | None
) -> Reason | None:
    least = request.num_alike if request.roles else request.least
    most = 0
    for node in usable:
        most += fits(request.bundle, node.total)
        if most >= least:
            break
    if most >= least and request.roles:
        return _why_never_with_roles(request, usable, topology)
    if most >= least:
        if request.required_level is None:
            return None
        sizes = {node.id: fits(request.bundle, node.total) for node in usable}
        return _why_never_together(request, topology or Topology((), usable), sizes)
    if most:
        capacity = workers(most) if request.roles else most
        return _unsatisfiable(
            f"{needs(request)}, but the whole cluster has room for {capacity} at once"
            + (", each on a different GPU" if is_part_of_gpu(request.bundle) else ""),
        )
    totals = [node.total for node in usable]
    lacking = [
        (name, amount, max((total.get(name, 0.0) for total in totals), default=0.0))
        for name, amount in request.bundle.items()
    ]
    missing = [entry for entry in lacking if entry[2] + EPSILON < entry[1]]
    if not missing:
        return _unsatisfiable(
            f"{needs(request)}, but no single node of the cluster has all of these resources"
        )
    name, amount, best = missing[0]
    if name.startswith(LABEL):
        label = name.removeprefix(LABEL)
        return _unsatisfiable(f"no node of the cluster has the label {label}")
    if name.startswith("accelerator_type:"):
        kind = name.removeprefix("accelerator_type:")
        return _unsatisfiable(f"no node of the cluster has the accelerator {kind}")
    asked, there = distinct_amounts(name, amount, best)
    return _unsatisfiable(
        f"each worker needs {asked}, but the largest node has {there if best else f'no {name}'}"
    )


def _why_never_with_roles(
    request: Request, nodes: Sequence[Node], topology: Topology | None
) -> Reason | None:
    """Return why roles with their own resources do not fit in the cluster together with the other
    ranks; None if they fit."""
    free = {node.id: node.total for node in nodes}
    if not never_fits(request, free, topology or Topology((), nodes)):
        return None
    role = lacking_role(request, nodes)
    capacity = (
        "each of these, but not for all" if role is None else spoken_ranks(_fitting(role, nodes))
    )
    return _unsatisfiable(
        f"{needs(request)}, but the whole cluster has room for {capacity} at once"
    )


def lacking_role(request: Request, nodes: Sequence[Node]) -> RoleSlots | None:
    """Return the first role with its own resources that does not fit on the accepted nodes even if
    they are empty; None if each role fits by itself."""
    usable = [node for node in nodes if node.accepted]
    lacking = (role for role in request.roles if _fitting(role, usable).number < role.number)
    return next(lacking, None)


def _fitting(role: RoleSlots, nodes: Sequence[Node]) -> RoleSlots:
    """Return a copy of the role with the number of ranks that fit on the empty nodes."""
    return replace(role, number=sum(fits(role.bundle, node.total) for node in nodes))


def unplaceable_worker(request: Request, nodes: Sequence[Node]) -> int | None:
    """Return the index in `homes` of a worker that does not fit on its nodes even if they are
    empty, or len(homes) if the first worker does not fit; None if all workers fit."""
    if not request.homes:
        return None
    total_of = {node.id: node.total for node in nodes}
    found = place_pinned(
        request.homes,
        {node_id: fits_pinned(request.bundle, total) for node_id, total in total_of.items()},
        lambda node_id, labels: all(label in total_of[node_id] for label in labels),
        lambda node_id: is_open(total_of[node_id]),
    )
    return found if isinstance(found, int) else None


def _why_unplaceable(request: Request, nodes: Sequence[Node]) -> Reason | None:
    worker = unplaceable_worker(request, nodes)
    if worker is None:
        return None
    if worker == len(request.homes):
        return _unsatisfiable(
            "no node of the cluster has room for the aggregating worker in addition to the workers "
            f"of silos: it needs {spoken_bundle(request.bundle)} on a node without a silo's data"
        )
    labels = " and ".join(label.removeprefix(LABEL) for label in request.homes[worker])
    return _unsatisfiable(
        f"no node of the cluster with the label {labels} has room for the worker of "
        f"federated.silos[{worker}] in addition to other silos: "
        f"it needs {spoken_bundle(request.bundle)}"
    )


def _why_never_together(
    request: Request, topology: Topology, sizes: Mapping[str, int]
) -> Reason | None:
    """Return why no domain of the required level could hold the gang. `sizes` contains the number
    of workers that fit on each node."""
    level = request.required_level
    if level is None:
        return None
    if (no_level := why_no_level(request, topology)) is not None:
        return no_level
    capacities = topology.capacities(sizes, level)
    place = largest(capacities)
    if capacities[place] >= request.least:
        return None
    return _unsatisfiable(
        f"{needs(request)}, but the largest {level}, {name_of(place)}, has room for "
        f"{capacities[place]} at once"
    )


def why_no_level(request: Request, topology: Topology) -> Reason | None:
    """Return an error if the topology lacks the required level; else None."""
    level = request.required_level
    if level is None or topology.has(level):
        return None
    known = ", ".join(topology.levels)
    return _unsatisfiable(
        f"{needs(request)}, but {level!r} is not a level of the topology (DRAY_TOPOLOGY), whose "
        f"levels are {known}"
    )


def _unsatisfiable(message: str) -> Reason:
    return Reason("unsatisfiable", message)


def lacking_resource(request: Request, nodes: Sequence[Node]) -> str | None:
    """Return the first resource of which no accepted node has enough for a single worker; None if
    there is no such resource, which means that only the number of workers is too large."""
    totals = [node.total for node in nodes if node.accepted and is_open(node.total)]
    for name, amount in request.bundle.items():
        if all(total.get(name, 0.0) + EPSILON < amount for total in totals):
            return name
    return None
