"""Placement of gangs with heterogeneous slots, in which some roles request different resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.placement import Placement
from service.domain.scheduling.placement.slots import EPSILON, Request, add, fits
from service.domain.scheduling.placement.topology import Topology

Free = Mapping[str, Mapping[str, float]]
"""The free resources of nodes, keyed by node id."""
Sort = tuple[int, Mapping[str, float]]
"""The number of ranks with equal slots, and their bundle."""

MOST_TRIED = 2_000
"""Maximum number of steps of a search."""
MOST_NODES = 32
"""Maximum number of nodes in a search; with more nodes, the search would take too long."""


def place_heterogeneous(request: Request, free: Free, topology: Topology) -> tuple[Slice, ...]:
    """Return slices for all ranks, in rank order, each as close as possible to the previous slices.
    Returns an empty tuple if no placement exists or none was found."""
    return _placed(request, free, topology)[0]


def never_fits(request: Request, free: Free, topology: Topology) -> bool:
    """Whether it is certain that no placement for the ranks exists."""
    found, is_sure = _placed(request, free, topology)
    return not found and is_sure


def _placed(request: Request, free: Free, topology: Topology) -> tuple[tuple[Slice, ...], bool]:
    """Return (slices, is_certain). If `slices` is empty, `is_certain` states whether the search has
    shown that no placement exists."""
    sorts: list[Sort] = [(role.number, role.bundle) for role in request.roles]
    sorts.append((request.num_alike, request.bundle))
    alike = len(sorts) - 1
    own = sorted(range(alike), key=lambda at: _size(sorts[at][1]), reverse=True)
    # Try both orders, because ranks without their own resources could take the only slots that fit
    # the other ranks.
    for order in ([alike, *own], [*own, alike]):
        if found := _place([sorts[at] for at in order], free, topology):
            return _in_order(request, dict(zip(order, found, strict=True))), True
    search = _Search([sorts[at] for at in (*own, alike)], free)
    if not (found := search.found()):
        return (), not search.was_given_up
    return _in_order(request, dict(zip((*own, alike), found, strict=True))), True


def _size(bundle: Mapping[str, float]) -> tuple[float, float]:
    return bundle.get("CPU", 0.0), bundle.get("memory", 0.0)


def _in_order(request: Request, of_sort: Mapping[int, Sequence[Slice]]) -> tuple[Slice, ...]:
    """Return slices in rank order. `of_sort` contains the slices of each role, followed by the
    slices of all other ranks."""
    others, found, rank = list(of_sort[len(request.roles)]), [], 0

    def take(number: int) -> None:
        while number:
            part = others.pop(0)
            chosen = min(number, part.num_workers)
            found.append(Slice(part.node_id, chosen))
            if part.num_workers > chosen:
                others.insert(0, Slice(part.node_id, part.num_workers - chosen))
            number -= chosen

    for at, role in enumerate(request.roles):
        take(role.first_rank - rank)
        found += of_sort[at]
        rank = role.first_rank + role.number
    take(request.num_workers - rank)
    return tuple(found)


def _place(sorts: Sequence[Sort], free: Free, topology: Topology) -> list[tuple[Slice, ...]]:
    """Place one kind of rank after another, and return the slices of each kind; an empty list if a
    kind does not fit."""
    left = {node_id: dict(has) for node_id, has in free.items()}
    found: list[tuple[Slice, ...]] = []
    for number, bundle in sorts:
        sizes = {node_id: size for node_id, has in left.items() if (size := fits(bundle, has))}
        if sum(sizes.values()) < number:
            return []
        near = [part.node_id for slices in found for part in slices]
        found.append(Placement(topology, sizes).pack(number, near) if number else ())
        for part in found[-1]:
            add(left[part.node_id], bundle, -part.num_workers)
    return found


class _Search:
    """A search that tries every number of ranks of each kind on each node."""

    def __init__(self, sorts: Sequence[Sort], free: Free) -> None:
        self._sorts = sorts
        self._left = {
            node_id: dict(has)
            for node_id, has in sorted(free.items())
            if any(fits(bundle, has) for _, bundle in sorts)
        }
        self._nodes = list(self._left)
        self._chosen: list[list[Slice]] = [[] for _ in sorts]
        self._known: set[tuple[object, ...]] = set()
        """States from which the search has already failed."""
        self.was_given_up = False

    def found(self) -> list[tuple[Slice, ...]]:
        """Return the slices of each kind of rank; an empty list if no placement exists or none was
        found."""
        could = all(number <= self._capacity_of(bundle, 0) for number, bundle in self._sorts)
        if not could or not self._has_enough():
            return []
        self.was_given_up = len(self._nodes) > MOST_NODES
        if self.was_given_up or not self._fill(0, 0, self._sorts[0][0]):
            return []
        return [tuple(reversed(slices)) for slices in self._chosen]

    def _has_enough(self) -> bool:
        """Whether the nodes together have enough of each resource."""
        needed: dict[str, float] = {}
        for number, bundle in self._sorts:
            add(needed, bundle, number)
        return all(
            sum(has.get(name, 0.0) for has in self._left.values()) + EPSILON >= amount
            for name, amount in needed.items()
        )

    def _capacity_of(self, bundle: Mapping[str, float], first: int) -> int:
        """Return how many such workers fit on the nodes from index `first` to the last."""
        return sum(fits(bundle, self._left[node_id]) for node_id in self._nodes[first:])

    def _fill(self, sort: int, at: int, number: int) -> bool:
        """Choose nodes for `number` ranks of the kind with index `sort`, starting at node `at`, and
        then for all later kinds. Returns whether that succeeded."""
        if not number:
            last = sort + 1 == len(self._sorts)
            return last or self._fill(sort + 1, 0, self._sorts[sort + 1][0])
        state = sort, at, number, *(tuple(has.values()) for has in self._left.values())
        self.was_given_up |= len(self._known) >= MOST_TRIED
        if self.was_given_up or state in self._known:
            return False
        bundle = self._sorts[sort][1]
        if self._capacity_of(bundle, at) >= number:
            node_id = self._nodes[at]
            before = self._left[node_id]
            for here in range(min(number, fits(bundle, before)), -1, -1):
                self._left[node_id] = dict(before)
                add(self._left[node_id], bundle, -here)
                if self._fill(sort, at + 1, number - here):
                    self._chosen[sort] += [Slice(node_id, here)] if here else []
                    return True
            self._left[node_id] = before
        self._known.add(state)
        return False
