"""Slots as plain data: requests of gangs, resources of nodes, and whether a request fits on a node.

Resource names are Ray's: `CPU`, `GPU`, `memory`, `accelerator_type:H100`. Node labels are treated
as resources in this module and in the bundles of jobs (`service.config.node_types`), and nowhere
else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dray.spec import Elastic, JobSpec, Resources
from ray_workers.shared.slices import RoleSlots, Slice, by_bundle
from service.config.node_types import (
    LABEL_SHARE,
    OPEN,
    label_resources,
    resources_of_node,
)
from service.domain.scheduling.placement.pinned_nodes import PinnedNodes

ACCELERATOR = "accelerator_type:"
EPSILON = 1e-6
"""Tolerance for sums of floats. Ray counts resources in ten-thousandths."""

Kind = tuple[tuple[str, float], ...]
"""A bundle as a hashable key."""

NUM_GPUS = "number of GPUs"
"""A pseudo-resource of a node: the number of its GPUs that no job uses exclusively. Workers do not
request this pseudo-resource."""
WHOLE_GPUS = "whole GPUs"
"""A pseudo-resource of a node: the number of its GPUs that no job uses, not even a fraction. Like
`NUM_GPUS`, this resource exists only while GPUs are shared."""

GPUS_FITTING = "GPUs with room for "
"""Prefix of the names of resources that count the GPUs on which a fraction of a given size still
fits."""
ACCELERATOR_SHARE = 0.001
"""The amount of `accelerator_type:X` that is requested from Ray to place a worker on a node with
that accelerator."""


@dataclass(frozen=True, eq=False)
class Fence:
    """The nodes that a gang can't use in one plan, because of reservations. Instances are compared
    by identity.

    Nodes that are in the same reservations form a cell (`CELL`). An integer stands for a set of
    cells: its bit N is set if the set contains cell N."""

    closed: int
    """The cells that the gang can't use."""
    reserved: int
    """The subset of `closed` that is reserved for other jobs."""
    windows: int
    """The reservations for other jobs, as bits in the order of `Windows`."""
    cells: Sequence[Sequence[str]]
    """The nodes of each cell."""
    own: str | None = None
    """The reservation outside of which the gang can't run. `reserved` contains only its nodes."""

    @functools.cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that the gang can't use."""
        return frozenset(
            name for at, names in enumerate(self.cells) if self.closed >> at & 1 for name in names
        )


@dataclass(frozen=True)
class Request:
    """The request of a gang: `num_workers` bundles. Roles can have different bundles."""

    num_workers: int
    """Number of workers, including all roles and spares."""
    bundle: Mapping[str, float]
    min_workers: int | None = None
    """Minimum number of workers with which an elastic gang can start and continue; None if it is
    not elastic."""
    required_level: str | None = None
    """Level of the topology: a single domain of this level must hold the gang. None if there is no
    such requirement."""
    homes: PinnedNodes = ()
    """The pinned nodes of each worker except the first; empty if workers are not pinned."""
    roles: tuple[RoleSlots, ...] = ()
    """Roles with their own resources."""
    num_spares: int = 0
    """Number of spares of a complete gang."""
    fence: Fence | None = None
    """Set while a plan is made, if the gang can't use some nodes because of reservations."""
    num_parts: int = 1
    """Number of workers that hold one replica of an elastic gang's model. The number of workers
    that train is a multiple of this number."""

    @property
    def is_bound(self) -> bool:
        """Whether the gang can run only in its reservation."""
        return self.fence is not None and self.fence.own is not None

    @functools.cached_property
    def kind(self) -> Kind:
        """A key that is equal for equal bundles, regardless of the order of their resources."""
        return tuple(sorted(self.bundle.items()))

    @functools.cached_property
    def role_kinds(self) -> tuple[tuple[int, int, Kind], ...]:
        """A hashable key for the roles with their own resources: equal if their ranks and resources
        are equal."""
        return tuple(
            (role.first_rank, role.number, tuple(sorted(role.bundle.items())))
            for role in self.roles
        )

    @property
    def num_alike(self) -> int:
        """Number of ranks without their own resources."""
        return self.num_workers - sum(role.number for role in self.roles)

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, Mapping[str, float]], ...]:
        """(number, bundle) of consecutive ranks with equal slots, in rank order."""
        found: list[tuple[int, Mapping[str, float]]] = []
        rank = 0
        for role in self.roles:
            found += [(role.first_rank - rank, self.bundle), (role.number, role.bundle)]
            rank = role.first_rank + role.number
        return tuple(run for run in (*found, (self.num_workers - rank, self.bundle)) if run[0])

    @property
    def mean_bundle(self) -> Mapping[str, float]:
        """The resources of all workers divided by the number of workers."""
        if not self.roles:
            return self.bundle
        total: dict[str, float] = {}
        for number, bundle in self.runs:
            add(total, bundle, number)
        return {name: amount / self.num_workers for name, amount in total.items()}

    def of_size(self, num_workers: int) -> Request:
        """Return this request with exactly `num_workers` workers."""
        num_spares = max(0, num_workers - self.num_ranks)
        return replace(self, num_workers=num_workers, min_workers=None, num_spares=num_spares)

    @property
    def num_ranks(self) -> int:
        """Number of workers that train in a complete gang."""
        return self.num_workers - self.num_spares

    def rounded_down(self, num_workers: int) -> int:
        """Return the gang's largest size that is at most `num_workers` (see the function
        `rounded_down`)."""
        return rounded_down(num_workers, self.num_parts, self.num_ranks)

    @property
    def least(self) -> int:
        """Minimum number of workers with which the gang starts."""
        return self.num_workers if self.min_workers is None else self.min_workers

    @property
    def least_running(self) -> int:
        """Minimum number of workers that the gang keeps while it runs. It can release its
        spares."""
        return self.num_ranks if self.min_workers is None else self.min_workers


@dataclass(frozen=True)
class Holder:
    """A job that holds slots."""

    job_id: str
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    queue: str = "default"
    owner: str = "default"
    roles: tuple[RoleSlots, ...] = ()

    @property
    def request(self) -> Request:
        return Request(count(self.slices), self.bundle, roles=self.roles)


@dataclass(frozen=True)
class Node:
    id: str
    total: Mapping[str, float]
    available_to_us: Mapping[str, float]
    """The resources that a launch can use now (see `offered`)."""
    accepted: bool = True
    quarantined: Mapping[str, float] = field(default_factory=dict)
    """Resources of slots that can't be used, because stuck processes of ended attempts occupy them,
    or because their hardware is withheld. The end of a job does not free these resources."""
    is_starting: bool = False
    """Whether the node is not accepted yet because its agent is starting."""
    withheld: tuple[str, ...] = ()
    """The node's host name and the names of the resources that get no new work because of a fault
    or a self-test; empty if there is none."""
    after_test: Mapping[str, float] | None = None
    """The resources that a launch can use once a self-test is done; None if no resources are
    withheld, or also because of a fault."""

    @property
    def is_tested(self) -> bool:
        """Whether resources are withheld only until a self-test is done."""
        return self.after_test is not None

    @classmethod
    def labelled(
        cls,
        node_id: str,
        total: Mapping[str, float],
        available_to_us: Mapping[str, float],
        labels: Mapping[str, str],
        *,
        accepted: bool = True,
        quarantined: Mapping[str, float] | None = None,
        is_starting: bool = False,
    ) -> Node:
        """Return a node with its labels added to its resources."""
        found = resources_of_node(labels)
        here, free = {**total, **found}, {**available_to_us, **found}
        return cls(node_id, here, free, accepted, quarantined or {}, is_starting)


def is_open(resources: Mapping[str, float]) -> bool:
    """Whether a node with these resources accepts ranks other than silos."""
    return resources.get(OPEN, math.inf) > 0


def request_of(resources: Resources, elastic: Elastic | None = None) -> Request:
    """Return the request of a gang with equal slots, with Ray's resource names."""
    bundle = {"CPU": float(resources.cpus_per_worker)}
    if resources.gpus_per_worker:
        bundle["GPU"] = float(resources.gpus_per_worker)
    if resources.memory_bytes is not None:
        bundle["memory"] = float(resources.memory_bytes)
    if resources.accelerator is not None:
        bundle[f"accelerator_type:{resources.accelerator}"] = ACCELERATOR_SHARE
    bundle |= dict.fromkeys(label_resources(resources.node_labels), LABEL_SHARE)
    least, num_spares = (None, 0) if elastic is None else (elastic.min_workers, elastic.spares)
    num_workers, level = resources.num_workers + num_spares, resources.required_topology
    return Request(num_workers, bundle, least, level, num_spares=num_spares)


def request_of_job(spec: JobSpec) -> Request:
    """Return the request of a job document. Roles with their own resources also require the node
    labels of the job's `resources`."""
    request = request_of(spec.resources, spec.elastic)
    labels = dict.fromkeys(label_resources(spec.resources.node_labels), LABEL_SHARE)
    roles = []
    for name, ranks, own in spec.roles_with_resources:
        bundle = {"CPU": float(own.cpus), **labels}
        if own.memory_bytes is not None:
            bundle["memory"] = float(own.memory_bytes)
        roles.append(RoleSlots(name, ranks.start, len(ranks), bundle))
    num_parts = spec.parallel.num_parts if spec.changes_size else 1
    return replace(request, roles=tuple(roles), num_parts=num_parts)


def offered(
    total: Mapping[str, float],
    available: Mapping[str, float],
    held: Mapping[str, float],
) -> dict[str, float]:
    """Return the resources of a node that a launch can use: the resources that are free in Ray and
    not held by dray's attempts.

    Both conditions are needed: Ray does not show dray's claims immediately, and only Ray shows the
    usage of other programs.
    """
    return {
        name: max(0.0, min(available.get(name, 0.0), amount - held.get(name, 0.0)))
        for name, amount in total.items()
    }


def held_by_node(holders: Sequence[Holder]) -> dict[str, dict[str, float]]:
    """Return the resources that the jobs hold, keyed by node."""
    held: dict[str, dict[str, float]] = {}
    for holder in holders:
        for part, bundle in by_bundle(holder.slices, holder.bundle, holder.roles):
            add(held.setdefault(part.node_id, {}), bundle, part.num_workers)
    return held


def held_on(node_id: str, holders: Sequence[Holder]) -> dict[str, float]:
    """Return the resources that the jobs hold on one node."""
    return held_by_node(holders).get(node_id, {})


def spares_last(slices: Sequence[Slice], num_spares: int) -> tuple[Slice, ...]:
    """Split the slices so that each of the last `num_spares` workers has its own slice, which a
    group can release without releasing other workers."""
    ranks, spares = list(slices), list[Slice]()
    while len(spares) < num_spares:
        last = ranks.pop()
        spares.insert(0, Slice(last.node_id, 1))
        if last.num_workers > 1:
            ranks.append(Slice(last.node_id, last.num_workers - 1))
    return (*ranks, *spares)


def fits(bundle: Mapping[str, float], free: Mapping[str, float]) -> int:
    """Return how many workers of one job fit into the free resources, for jobs without silos.
    Workers of the same job do not share a GPU."""
    return fits_pinned(bundle, free) if is_open(free) else 0


def fits_pinned(bundle: Mapping[str, float], free: Mapping[str, float]) -> int:
    """Like `fits`, but for workers of silos."""
    counts = [
        math.floor((free.get(name, 0.0) + EPSILON) / amount)
        for name, amount in bundle.items()
        if amount > 0
    ]
    if gpus := bundle.get("GPU"):
        counts.append(_gpus_apart(gpus, free))
    return max(0, min(counts, default=0))


def is_part_of_gpu(bundle: Mapping[str, float]) -> bool:
    """Whether each worker requests a fraction of a GPU, so that other jobs can use the rest."""
    return 0 < bundle.get("GPU", 0.0) < 1


def gpus_fitting(part: float) -> str:
    return f"{GPUS_FITTING}{part:g}"


def _gpus_apart(gpus: float, free: Mapping[str, float]) -> int:
    """Return how many workers fit if no two of them share a GPU."""
    left = free.get("GPU", 0.0)
    if gpus < 1:
        number = free.get(NUM_GPUS, math.ceil(left - EPSILON))
        return math.floor(free.get(gpus_fitting(gpus), number))
    return math.floor((free.get(WHOLE_GPUS, left) + EPSILON) / gpus)


def rounded_down(num_workers: int, num_parts: int, num_ranks: int | None = None) -> int:
    """Return the largest size of a gang that is at most `num_workers`. The size is a multiple of
    `num_parts` or at least `num_ranks`, because all workers in addition to `num_ranks` are
    spares."""
    if num_ranks is not None and num_workers >= num_ranks:
        return num_workers
    return num_workers // num_parts * num_parts


def count(slices: Sequence[Slice]) -> int:
    return sum(part.num_workers for part in slices)


def add(free: dict[str, float], bundle: Mapping[str, float], times: int) -> None:
    """Add `times` bundles to the free resources. If `times` is negative, bundles are removed."""
    for name, amount in bundle.items():
        free[name] = free.get(name, 0.0) + times * amount
    if WHOLE_GPUS in free:  # assume that a worker's fraction is the only fraction on its GPU
        gpus = math.ceil(bundle.get("GPU", 0.0))
        free[WHOLE_GPUS] += times * gpus
        free[NUM_GPUS] += 0 if is_part_of_gpu(bundle) else times * gpus


def free_again(free: dict[str, float], node: Node, bundle: Mapping[str, float], times: int) -> None:
    """Add the resources of `times` bundles, which a job releases on the node, to the free
    resources. The result is at
    most the node's total minus its quarantined resources."""
    add(free, bundle, times)
    for name in bundle:
        most = node.total.get(name, 0.0) - node.quarantined.get(name, 0.0)
        free[name] = max(0.0, min(free[name], most))


def amounts(bundle: Mapping[str, float], num_workers: int) -> dict[str, float]:
    """Return the resources that `num_workers` workers hold, as the queue rules count them."""
    return {
        name: num_workers * amount / (ACCELERATOR_SHARE if name.startswith(ACCELERATOR) else 1.0)
        for name, amount in bundle.items()
    }


def amounts_of(request: Request) -> dict[str, float]:
    """Return the `amounts` for all workers of a gang."""
    return amounts(request.mean_bundle, request.num_workers)


def share_of(request: Request, total: Mapping[str, float]) -> float:
    """Return a gang's dominant share (Ghodsi et al., NSDI 2011): the maximum, over all resources,
    of the fraction of the cluster's total that the gang requests."""
    shares = (
        request.num_workers * amount / total[name]
        for name, amount in request.mean_bundle.items()
        if total.get(name)
    )
    return max(shares, default=0.0)


def total_of(totals: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the total resources of the nodes that are open to all jobs."""
    total: dict[str, float] = {}
    for each in filter(is_open, totals):
        for name, amount in each.items():
            total[name] = total.get(name, 0.0) + amount
    return total
