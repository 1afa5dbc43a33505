"""Slots as plain data: the request of a gang, the resources of nodes, and how one fits the other.

Resource names are Ray's: `CPU`, `GPU`, `memory`, `accelerator_type:H100`. Labels of nodes are
among the resources here and in the bundles of jobs (`service.config.node_types`), and nowhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dray.spec import Elastic, JobSpec, Resources
from ray_workers.shared.contracts import RoleSlots, Slice, by_bundle
from service.config.node_types import (
    LABEL_SHARE,
    OPEN,
    label_resources,
    labels_in,
    resources_of_node,
    without_labels,
)
from service.domain.scheduling.placement.homes import Homes

ACCELERATOR = "accelerator_type:"
EPSILON = 1e-6
"""Ray counts resources in ten-thousandths; sums of floats are only nearly exact."""

Kind = tuple[tuple[str, float], ...]
"""A bundle, to look things up by it."""

NUM_GPUS = "number of GPUs"
"""Of what a node has free: how many of its GPUs nobody has whole. Workers never ask for it."""
WHOLE_GPUS = "whole GPUs"
"""The same: GPUs of which nobody has a part. Both are there only while GPUs are shared."""

ROOM_FOR = "GPUs with room for "
"""The beginning of the name of a resource: how many GPUs have room for a part of this size."""
UNITS = ("bytes", "KiB", "MiB", "GiB")
"""Of memory, each 1024 times the one before."""

ACCELERATOR_SHARE = 0.001
"""The amount of `accelerator_type:X` that Ray itself asks for to bind a worker to such a node."""


@dataclass(frozen=True)
class Request:
    """The request of a gang: `num_workers` times `bundle`, but for roles with their own."""

    num_workers: int
    """Those of all roles."""
    bundle: Mapping[str, float]
    min_workers: int | None = None
    """With how few an elastic gang may start and go on; None: all of them or none."""
    required_level: str | None = None
    """The level of the topology of which one domain must hold the gang; None: none must."""
    homes: Homes = ()
    """Of a gang with homes, one for each worker but the first."""
    roles: tuple[RoleSlots, ...] = ()
    """Ranks with resources of their own."""

    @functools.cached_property
    def kind(self) -> Kind:
        """The same for equal bundles, whatever the order of their resources."""
        return tuple(sorted(self.bundle.items()))

    @functools.cached_property
    def role_kinds(self) -> tuple[tuple[int, int, Kind], ...]:
        """The ranks with resources of their own, and these: the same for equal ones."""
        return tuple(
            (role.first_rank, role.number, tuple(sorted(role.bundle.items())))
            for role in self.roles
        )

    @property
    def num_alike(self) -> int:
        """Ranks that have no resources of their own."""
        return self.num_workers - sum(role.number for role in self.roles)

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, Mapping[str, float]], ...]:
        """How many consecutive ranks have equal slots, and their bundle, in the order of ranks."""
        found: list[tuple[int, Mapping[str, float]]] = []
        rank = 0
        for role in self.roles:
            found += [(role.first_rank - rank, self.bundle), (role.number, role.bundle)]
            rank = role.first_rank + role.number
        return tuple(run for run in (*found, (self.num_workers - rank, self.bundle)) if run[0])

    @property
    def mean_bundle(self) -> Mapping[str, float]:
        """The same total amounts, if all had as much."""
        if not self.roles:
            return self.bundle
        total: dict[str, float] = {}
        for number, bundle in self.runs:
            add(total, bundle, number)
        return {name: amount / self.num_workers for name, amount in total.items()}

    def of_size(self, num_workers: int) -> Request:
        """The same for so many workers, and no fewer."""
        return replace(self, num_workers=num_workers, min_workers=None)

    @property
    def least(self) -> int:
        return self.num_workers if self.min_workers is None else self.min_workers


@dataclass(frozen=True)
class Holder:
    """A job that has slots."""

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
    """The resources that a launch may take now: see `offered`."""
    accepted: bool = True
    quarantined: Mapping[str, float] = field(default_factory=dict)
    """Resources of slots in which processes of ended attempts are stuck: no end of a job frees
    them."""
    is_starting: bool = False
    """It is not accepted yet, because its agent starts."""

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
        """With its labels among its resources."""
        found = resources_of_node(labels)
        here, free = {**total, **found}, {**available_to_us, **found}
        return cls(node_id, here, free, accepted, quarantined or {}, is_starting)


def is_open(resources: Mapping[str, float]) -> bool:
    """Whether a node with these resources takes ranks other than those of silos."""
    return resources.get(OPEN, math.inf) > 0


def request_of(resources: Resources, elastic: Elastic | None = None) -> Request:
    """The request of gangs whose slots are alike, in Ray's names."""
    bundle = {"CPU": float(resources.cpus_per_worker)}
    if resources.gpus_per_worker:
        bundle["GPU"] = float(resources.gpus_per_worker)
    if resources.memory_bytes is not None:
        bundle["memory"] = float(resources.memory_bytes)
    if resources.accelerator is not None:
        bundle[f"accelerator_type:{resources.accelerator}"] = ACCELERATOR_SHARE
    bundle |= dict.fromkeys(label_resources(resources.node_labels), LABEL_SHARE)
    least = None if elastic is None else elastic.min_workers
    return Request(resources.num_workers, bundle, least, resources.required_topology)


def request_of_job(spec: JobSpec) -> Request:
    """The request of a job document. Roles with resources of their own go on nodes with the same
    labels."""
    request = request_of(spec.resources, spec.elastic)
    labels = dict.fromkeys(label_resources(spec.resources.node_labels), LABEL_SHARE)
    roles = []
    for name, ranks, own in spec.roles_with_resources:
        bundle = {"CPU": float(own.cpus), **labels}
        if own.memory_bytes is not None:
            bundle["memory"] = float(own.memory_bytes)
        roles.append(RoleSlots(name, ranks.start, len(ranks), bundle))
    return replace(request, roles=tuple(roles))


def offered(
    total: Mapping[str, float],
    available: Mapping[str, float],
    held: Mapping[str, float],
) -> dict[str, float]:
    """The resources of a node that a launch may take: free ones, without those that our own
    attempts hold.

    A claim counts at once, though Ray learns of it later; only Ray knows of the use by others.
    """
    return {
        name: max(0.0, min(available.get(name, 0.0), amount - held.get(name, 0.0)))
        for name, amount in total.items()
    }


def held_by_node(holders: Sequence[Holder]) -> dict[str, dict[str, float]]:
    """Sum of what the holders have on each node where they have anything."""
    held: dict[str, dict[str, float]] = {}
    for holder in holders:
        for part, bundle in by_bundle(holder.slices, holder.bundle, holder.roles):
            add(held.setdefault(part.node_id, {}), bundle, part.num_workers)
    return held


def held_on(node_id: str, holders: Sequence[Holder]) -> dict[str, float]:
    """Sum of what the holders have on one node."""
    return held_by_node(holders).get(node_id, {})


def fits(bundle: Mapping[str, float], free: Mapping[str, float]) -> int:
    """How many workers of one job with this bundle the free resources carry. No two of them share a
    GPU, and none is of a silo."""
    return fits_at_home(bundle, free) if is_open(free) else 0


def fits_at_home(bundle: Mapping[str, float], free: Mapping[str, float]) -> int:
    """The same for workers of silos."""
    counts = [
        math.floor((free.get(name, 0.0) + EPSILON) / amount)
        for name, amount in bundle.items()
        if amount > 0
    ]
    if gpus := bundle.get("GPU"):
        counts.append(_gpus_apart(gpus, free))
    return max(0, min(counts, default=0))


def is_part_of_gpu(bundle: Mapping[str, float]) -> bool:
    """Whether each worker asks for a part of a GPU, and others may have the rest."""
    return 0 < bundle.get("GPU", 0.0) < 1


def room_for(part: float) -> str:
    return f"{ROOM_FOR}{part:g}"


def _gpus_apart(gpus: float, free: Mapping[str, float]) -> int:
    """How many workers find GPUs that none of the others has."""
    left = free.get("GPU", 0.0)
    if gpus < 1:
        number = free.get(NUM_GPUS, math.ceil(left - EPSILON))
        return math.floor(free.get(room_for(gpus), number))
    return math.floor((free.get(WHOLE_GPUS, left) + EPSILON) / gpus)


def count(slices: Sequence[Slice]) -> int:
    return sum(part.num_workers for part in slices)


def add(free: dict[str, float], bundle: Mapping[str, float], times: int) -> None:
    """Return so many bundles; `times` may be negative, to take what was returned."""
    for name, amount in bundle.items():
        free[name] = free.get(name, 0.0) + times * amount
    if WHOLE_GPUS in free:  # a worker's part may be the only one on its GPU
        gpus = math.ceil(bundle.get("GPU", 0.0))
        free[WHOLE_GPUS] += times * gpus
        free[NUM_GPUS] += 0 if is_part_of_gpu(bundle) else times * gpus


def free_again(free: dict[str, float], node: Node, bundle: Mapping[str, float], times: int) -> None:
    """Return so many bundles that a job had on the node to what it has free, up to what it can
    have."""
    add(free, bundle, times)
    for name in bundle:
        most = node.total.get(name, 0.0) - node.quarantined.get(name, 0.0)
        free[name] = max(0.0, min(free[name], most))


def needs(request: Request) -> str:
    """`needs 2 workers of 1 CPU within one rack`."""
    at_least = "at least " if request.min_workers is not None else ""
    level = request.required_level
    within = "" if level is None else f" within one {level}"
    within += ", those of silos on the nodes of their data" if request.homes else ""
    if not request.roles:
        number = workers(request.least)
        return f"needs {at_least}{number} of {spoken_bundle(request.bundle)}{within}"
    own = [f"{spoken_ranks(role)} of {spoken_bundle(role.bundle)}" for role in request.roles]
    alike = f"{workers(request.num_alike)} of {spoken_bundle(request.bundle)}"
    return f"needs {', '.join([alike, *own[:-1]])}, and {own[-1]}"


def workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def number_of_nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def spoken_ranks(role: RoleSlots) -> str:
    """`1 server`, `2 servers`, `2 ps`."""
    is_plain = role.number == 1 or role.role.endswith("s")
    return f"{role.number} {role.role}{'' if is_plain else 's'}"


def spoken_bundle(bundle: Mapping[str, float]) -> str:
    """The bundle of one worker, for people."""
    parts = [
        amount_of(name, amount)
        for name, amount in without_labels(bundle).items()
        if not name.startswith("accelerator_type:")
    ]
    kinds = [
        name.removeprefix("accelerator_type:")
        for name in bundle
        if name.startswith("accelerator_type:")
    ]
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    labels = ", ".join(f"{key}={value}" for key, value in labels_in(bundle).items())
    where = f" on nodes with {labels}" if labels else ""
    return what + (f" on {kinds[0]}" if kinds else "") + where


def amount_of(name: str, amount: float, digits: int = 3) -> str:
    """`8 GPU`, `15.5 GiB of memory`; digits: of memory, if it has no more before the point."""
    if name != "memory":
        return f"{round(amount, 4):.15g} {name}"
    power = max((at for at in range(len(UNITS)) if amount >= 1024**at), default=0)
    value = amount / 1024**power
    return f"{value:.{max(digits, len(str(round(value))))}g} {UNITS[power]} of memory"


def told_apart(name: str, one: float, other: float) -> tuple[str, str]:
    """Both amounts, with as many digits as make their words differ."""
    for digits in range(3, 16):
        words = amount_of(name, one, digits), amount_of(name, other, digits)
        if words[0] != words[1]:
            break
    return words


def amounts(bundle: Mapping[str, float], num_workers: int) -> dict[str, float]:
    """The resources that so many workers hold, as rules count them."""
    return {
        name: num_workers * amount / (ACCELERATOR_SHARE if name.startswith(ACCELERATOR) else 1.0)
        for name, amount in bundle.items()
    }


def amounts_of(request: Request) -> dict[str, float]:
    """Those of a whole gang."""
    return amounts(request.mean_bundle, request.num_workers)


def spoken(name: str, amount: float) -> str:
    """`8 GPU`, `8 H100`, `8 GiB of memory`."""
    return amount_of(name.removeprefix(ACCELERATOR), amount)


def share_of(request: Request, total: Mapping[str, float]) -> float:
    """The share of the cluster that a gang holds, of the resource of which it takes most: its
    dominant share (Ghodsi et al., NSDI 2011)."""
    shares = (
        request.num_workers * amount / total[name]
        for name, amount in request.mean_bundle.items()
        if total.get(name)
    )
    return max(shares, default=0.0)


def total_of(totals: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of the resources of the nodes that all jobs may use, of which they have shares."""
    total: dict[str, float] = {}
    for each in filter(is_open, totals):
        for name, amount in each.items():
            total[name] = total.get(name, 0.0) + amount
    return total
