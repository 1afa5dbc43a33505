"""Values that are computed only once per plan for all jobs with equal requests, because even long
queues contain few different requests."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_workers.shared.slices import Slice, by_role
from service.config.node_types import CELL, OPEN
from service.domain.scheduling.placement.phrases import needs, spoken_bundle
from service.domain.scheduling.placement.pinned_nodes import PinnedNodes
from service.domain.scheduling.placement.slots import (
    EPSILON,
    GPUS_FITTING,
    NUM_GPUS,
    WHOLE_GPUS,
    Fence,
    Request,
    amounts,
    gpus_fitting,
    is_part_of_gpu,
    share_of,
)

SIZE_POWER = 0.7
"""A gang's weight is its size raised to this power. With an exponent of 1, a wide job would wait
behind every narrow job with the same runtime; with an exponent of 0, the width would not matter."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """The requirement that a single domain of `level` has capacity for at least `least` workers."""

    level: str
    least: int


class WorkerKind:
    """A kind of worker: workers with equal bundles in gangs with equal requirements. Instances are
    compared by identity."""

    def __init__(
        self,
        bundle: Mapping[str, float],
        required: Requirement | None,
        homes: PinnedNodes,
        heterogeneous: Request | None,
        fence: Fence | None = None,
        anywhere: WorkerKind | None = None,
    ) -> None:
        """`heterogeneous` is the request of a gang whose roles have their own resources; None for
        other gangs. `anywhere` is the kind of the same workers without the fence."""
        self.bundle = bundle
        self.fence = fence
        self.anywhere = anywhere or self
        self.heterogeneous = heterogeneous
        self.required = required
        self.homes = homes
        self.counted = tuple(
            amounts(bundle if heterogeneous is None else heterogeneous.mean_bundle, 1).items()
        )
        """A worker's resources, as the queue rules count them."""
        self.vector: tuple[float, ...] = ()
        """The worker's amount of each resource that any job requests."""
        self.role_vectors: Mapping[int, tuple[float, ...]] = {}
        """The vector of each role with its own resources, keyed by the role's first rank."""
        self.demand: tuple[tuple[int, float], ...] = ()
        """Pairs (index in the vector, amount) for the resources that a worker needs; with roles,
        each amount is the minimum over all roles."""
        self.cell_at = 0
        """Index of the node's cell in the vector, if there are fences."""

    @property
    def is_whole(self) -> bool:
        """Whether the workers of the gang can only be placed all at once."""
        return bool(self.homes) or self.heterogeneous is not None

    def vectors(self, slices: Sequence[Slice]) -> list[tuple[Slice, tuple[float, ...]]]:
        """Return the slices, each with the vector of its workers. With roles, `slices` must be all
        slices of the gang."""
        if self.heterogeneous is None:  # this case is frequent
            return [(part, self.vector) for part in slices]
        return [
            (part, self.vector if role is None else self.role_vectors[role.first_rank])
            for part, role in by_role(slices, self.heterogeneous.roles)
        ]

    def fits(self, free: Sequence[float], aside: Sequence[float] | None = None) -> int:
        """Like `slots.fits`, but for vectors. `free` contains the free resources, and `aside` the
        amounts of these resources that are set aside. For heterogeneous workers, the result is an
        upper bound."""
        if self.fence is not None and self.fence.closed >> int(free[self.cell_at]) & 1:
            return 0
        most = math.inf if self.demand else 0.0
        for at, each in self.demand:
            left = free[at] if aside is None else free[at] - aside[at]
            workers = (left + EPSILON) / each
            if workers < 1.0:  # true for most nodes
                return 0
            most = min(most, workers)
        return math.floor(most)


class Gang:
    """Jobs with equal requests."""

    def __init__(
        self, request: Request, kind: WorkerKind, share: float, anywhere: Gang | None = None
    ) -> None:
        """`anywhere` is the gang with the same request without the fence."""
        self.request = request
        self.kind = kind
        self.least = request.least
        self.anywhere = anywhere or self
        self.share = share
        """Largest fraction of any of the cluster's resources that the gang needs."""
        self.weight: float = share**SIZE_POWER
        """Weight of the gang's size in the order of the queue."""

    @functools.cached_property
    def needs(self) -> str:
        if self.anywhere is not self and not self.request.is_bound:
            return self.anywhere.needs
        return needs(self.request)

    @functools.cached_property
    def bundle_spoken(self) -> str:
        return spoken_bundle(self.request.bundle)


class Gangs:
    """The gangs of one plan, and the names of the resources that they request."""

    def __init__(self, total: Mapping[str, float]) -> None:
        """`total` is the sum of the cluster's resources."""
        self._total = total
        self._known: dict[int, Gang] = {}
        """Gangs, keyed by the `id()` of a request."""
        self._requests: list[Request] = []
        """The known requests, kept alive so that their `id()` is not reused."""
        self._gangs: dict[tuple[object, ...], Gang] = {}
        self._kinds: dict[tuple[object, ...], WorkerKind] = {}
        self.parts: tuple[float, ...] = ()
        """The requested fractions of GPUs."""
        self.names: tuple[str, ...] = ()
        """Names of the resources, in the order of the vectors."""
        self._has_pseudo_resources = False

    def of(self, request: Request) -> Gang:
        known = self._known.get(id(request))
        if known is None:
            known = self._known[id(request)] = self._equal_to(request, request.fence)
            self._requests.append(request)
        return known

    def _equal_to(self, request: Request, fence: Fence | None) -> Gang:
        """Return the gang of the request with this fence."""
        level = request.required_level
        size = request.num_workers, request.min_workers, request.num_spares, request.num_parts
        heterogeneous = (request.num_workers, request.role_kinds) if request.roles else None
        key = (*size, level, request.homes, heterogeneous, fence, *request.bundle.items())
        gang = self._gangs.get(key)
        if gang is None:
            bare = None if fence is None else self._equal_to(request, None)
            if request.fence is not fence:
                request = replace(request, fence=fence)
            required = None if level is None else Requirement(level, request.least)
            named = request.kind, required, request.homes, heterogeneous, fence
            kind = self._kinds.get(named)
            if kind is None:
                whole = request if request.roles else None
                anywhere = None if bare is None else bare.kind
                kind = WorkerKind(request.bundle, required, request.homes, whole, fence, anywhere)
                self._kinds[named] = kind
                self._measure(kind)
            share = share_of(request, self._total) if bare is None else bare.share
            gang = self._gangs[key] = Gang(request, kind, share, bare)
        return gang

    @property
    def kinds(self) -> Iterable[WorkerKind]:
        return self._kinds.values()

    @property
    def required(self) -> list[WorkerKind]:
        """The worker kinds of gangs that must be within one domain."""
        return [kind for kind in self._kinds.values() if kind.required is not None]

    def name_all(self, *, shares_gpus: bool = False, has_closed: bool = False) -> None:
        """Define the elements of the vectors: the resources that the known gangs request. Gangs
        added later hold slots but don't request any. `shares_gpus` states whether running jobs hold
        fractions of GPUs, and `has_closed` whether some nodes accept only ranks of silos."""
        names = dict.fromkeys(name for kind in self._kinds.values() for name in kind.bundle)
        homes = (home for kind in self._kinds.values() for home in kind.homes)
        names |= dict.fromkeys(label for home in homes for label in home)
        heterogeneous = (
            kind.heterogeneous for kind in self._kinds.values() if kind.heterogeneous is not None
        )
        names |= dict.fromkeys(name for request in heterogeneous for name in request.mean_bundle)
        shares_gpus = shares_gpus or any(is_part_of_gpu(k.bundle) for k in self._kinds.values())
        if "GPU" in names and shares_gpus:
            asked = {k.bundle["GPU"] for k in self._kinds.values() if is_part_of_gpu(k.bundle)}
            self.parts = tuple(sorted(asked))
            names |= dict.fromkeys((NUM_GPUS, WHOLE_GPUS, *map(gpus_fitting, self.parts)))
        if has_closed:
            names[OPEN] = None
        if any(kind.fence is not None for kind in self._kinds.values()):
            names[CELL] = None
        self.names = tuple(names)
        self._has_pseudo_resources = OPEN in names or NUM_GPUS in names
        for kind in self._kinds.values():
            self._measure(kind)

    def vector(self, resources: Mapping[str, float]) -> tuple[float, ...]:
        """Return a node's resources as a vector."""
        if self._has_pseudo_resources:
            return tuple([_amount(resources, name) for name in self.names])
        return tuple([resources.get(name) or 0.0 for name in self.names])

    def _measure(self, kind: WorkerKind) -> None:
        """Compute the vectors of a worker kind. Workers of the same job never share a GPU: each
        worker with a fraction needs a separate GPU with enough room, and workers with whole GPUs
        need GPUs on which no job has a fraction. Each fraction is assumed to be the only fraction
        on its GPU. A second fraction fits on the GPU if the sum of the two fractions is at most
        1."""
        if kind.fence is not None:
            bare = kind.anywhere
            kind.vector, kind.role_vectors, kind.demand = (
                bare.vector,
                bare.role_vectors,
                bare.demand,
            )
            kind.cell_at = self.names.index(CELL) if CELL in self.names else 0
            return
        is_part, gpus = is_part_of_gpu(kind.bundle), math.ceil(kind.bundle.get("GPU", 0.0))
        part = kind.bundle.get("GPU", 0.0)
        capacities = {
            gpus_fitting(each): gpus * (not is_part or part + each > 1.0 + EPSILON)
            for each in self.parts
        }
        taken = {**kind.bundle, NUM_GPUS: 0.0 if is_part else gpus, WHOLE_GPUS: gpus, **capacities}
        kind.vector = tuple([taken.get(name, 0.0) for name in self.names])
        needed = taken
        if is_part:
            none_of = dict.fromkeys((WHOLE_GPUS, *capacities), 0.0)
            needed = {**taken, NUM_GPUS: 1.0, **none_of, gpus_fitting(part): 1.0}
        roles = () if kind.heterogeneous is None else kind.heterogeneous.roles
        kind.role_vectors = {
            role.first_rank: tuple([role.bundle.get(name, 0.0) for name in self.names])
            for role in roles
        }
        for role in roles:
            needed = {name: min(n, role.bundle.get(name, 0.0)) for name, n in needed.items()}
        if not kind.homes and any(needed.get(name) for name in self.names):
            needed = {**needed, OPEN: 1.0}
        kind.demand = tuple(
            (at, needed[name]) for at, name in enumerate(self.names) if needed.get(name, 0.0) > 0
        )


def _amount(resources: Mapping[str, float], name: str) -> float:
    amount = resources.get(name)
    if amount is None and name == OPEN:
        return math.inf
    if amount is None and (name in (NUM_GPUS, WHOLE_GPUS) or name.startswith(GPUS_FITTING)):
        gpus = resources.get("GPU", 0.0)
        if name == WHOLE_GPUS:
            return gpus
        return resources.get(NUM_GPUS, math.ceil(gpus - EPSILON))
    return amount or 0.0
