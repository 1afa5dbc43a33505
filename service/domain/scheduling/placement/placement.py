"""Placement of gangs. Places the workers of a gang close together, leaving only small gaps on their
nodes.

A gang is placed on one node if a node has room for it. If no node has room, it is placed in the
narrowest domain of the topology that has room for it. If no domain has room either, it is placed on
as few domains as possible, starting with the domains that have the most room. The same rules apply
to the part of the gang in each domain, down to the nodes. If several nodes or domains qualify, the
gang is placed where it leaves the smallest gap; if the gaps are equal, it is placed where the
surrounding domains are the fullest, to preserve large gaps. Slices, and therefore ranks, are in the
order of their domains.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.topology import Domain, Place, Topology


class _Area:
    """The capacity of one domain."""

    __slots__ = ("capacity", "nodes", "num_nodes")

    def __init__(self) -> None:
        self.capacity = 0
        """Number of workers that fit in the domain."""
        self.num_nodes = 0
        """Number of nodes on which at least one worker fits."""
        self.nodes: dict[int, list[str]] = {}
        """Sorted lists of the nodes with free capacity that belong directly to this domain, keyed
        by the node's free capacity."""


_NOTHING = _Area()


class Placement:
    """Counts how many workers of one kind fit on each node and in each domain."""

    def __init__(self, topology: Topology, sizes: dict[str, int]) -> None:
        """`sizes` maps each node that has room to the number of workers that fit on it."""
        self._topology = topology
        self._size_of = sizes
        self._areas: defaultdict[Domain, _Area] = defaultdict(_Area)
        domain_of = topology.domain_of
        nodes: defaultdict[tuple[Domain, int], list[str]] = defaultdict(list)
        for node_id, size in sizes.items():
            nodes[domain_of[node_id], size].append(node_id)
        for (domain, size), there in nodes.items():
            self._areas[domain].nodes[size] = sorted(there)
            self._add(domain, size * len(there), len(there))

    def change(self, node_id: str, size: int) -> None:
        """Set the number of workers that fit on a node to `size`."""
        before = self._size_of.pop(node_id, 0)
        if size == before == 0:
            return
        domain = self._topology.domain_of[node_id]
        self._add(domain, size - before, (size > 0) - (before > 0))
        own = self._areas[domain].nodes
        if before:
            nodes = own[before]
            del nodes[bisect.bisect_left(nodes, node_id)]
            if not nodes:
                del own[before]
        if size:
            self._size_of[node_id] = size
            bisect.insort(own.setdefault(size, []), node_id)

    def _add(self, domain: Domain, capacity: int, num_nodes: int) -> None:
        for each in domain.around:
            area = self._areas[each]
            area.capacity += capacity
            area.num_nodes += num_nodes

    def capacity(self, place: Place) -> int:
        if isinstance(place, str):
            return self._size_of.get(place, 0)
        return self._areas.get(place, _NOTHING).capacity

    def capacities(self, level: str) -> dict[Place, int]:
        """Return how many workers fit in each domain of a level."""
        domains = self._topology.of_level(level)
        found: dict[Place, int] = {domain: self.capacity(domain) for domain in domains.all}
        for domain in domains.wider:
            area = self._areas.get(domain, _NOTHING)
            found |= {name: size for size, nodes in area.nodes.items() for name in nodes}
        return found

    def pack(
        self,
        num_workers: int,
        near: Sequence[str] = (),
        within: Place | None = None,
        num_apart: int = 0,
    ) -> tuple[Slice, ...]:
        """Return slices for `num_workers`. There must be enough free slots for this number of
        workers.

        The last `num_apart` workers are placed on nodes without any of the other workers, if such
        nodes have room.

        `near` are nodes on which the group already has workers. These nodes are used first, then
        the domains around them, from the narrowest to the widest. `within` restricts the slices to
        one domain or node.
        """
        pack = _Pack(self)
        for place in self._around(near):
            pack.fill(place, min(self.capacity(place), num_workers - pack.num_workers))
        everywhere = within or self._topology.cluster
        pack.fill(everywhere, num_workers - num_apart - pack.num_workers)
        num_there = min(num_workers - pack.num_workers, self.capacity(everywhere))
        pack.fill(everywhere, num_there)  # the nodes chosen so far count as full
        pack.fill_up(num_workers - pack.num_workers)
        return pack.finish()

    def _around(self, node_ids: Sequence[str]) -> list[Place]:
        """Return the nodes, sorted by decreasing free capacity, followed by the domains that
        contain them."""
        nodes = sorted(dict.fromkeys(node_ids), key=lambda name: -self.capacity(name))
        around = {d: None for name in nodes for d in self._topology.domain_of[name].around}
        return [*nodes, *sorted(around, key=lambda domain: -domain.level)]

    def narrowest(self, within: Domain, num_workers: int) -> Place | None:
        """Return a node inside `within` that has room for `num_workers`, or else the narrowest
        subdomain of `within` that has room; None if there is neither."""
        wide_enough = list(self._wide_enough(within, num_workers))
        fitting = [
            (size, domain)
            for domain in wide_enough
            for size in self._areas[domain].nodes
            if size >= num_workers
        ]
        if fitting:
            smallest = min([size for size, _ in fitting])
            tight = [domain for size, domain in fitting if size == smallest]
            # If several nodes or domains fit equally well, use the first one.
            domain = tight[0] if len(tight) == 1 else min(tight, key=self._fullness)
            return self._areas[domain].nodes[smallest][0]
        inner = [domain for domain in wide_enough if domain is not within]
        if not inner:
            return None
        level = max([domain.level for domain in inner])
        return min([domain for domain in inner if domain.level == level], key=self._fullness)

    def largest(self, within: Domain) -> Place:
        """Return the part of a domain with the most capacity: a subdomain, or a node directly in
        the domain."""
        own = self._areas[within].nodes
        size = max(own, default=0)
        children = [domain for domain in within.children if self.capacity(domain)]
        most = max([self.capacity(domain) for domain in children], default=0)
        if size >= most:
            return own[size][0]
        return min([d for d in children if self.capacity(d) == most], key=self._fullness)

    def _wide_enough(self, within: Domain, num_workers: int) -> Iterator[Domain]:
        if self.capacity(within) >= num_workers:
            yield within
            for child in within.children:
                yield from self._wide_enough(child, num_workers)

    def _fullness(self, domain: Domain) -> tuple[object, ...]:
        """Return a sort key for domains: by capacity, then by number of nodes with free capacity,
        then by the capacity and the number of nodes of each surrounding domain, and finally by
        name."""
        around = list(domain.around)
        areas = [self._areas[each] for each in around]
        capacities = [(area.capacity, area.num_nodes) for area in areas]
        return (capacities, [(each.level, each.name) for each in around])


class _Pack:
    """Slices that are chosen one by one. The capacity of chosen slices counts as used until
    `finish` restores it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._slices: list[Slice] = []
        self._before: dict[str, int] = {}
        """The free capacity of each chosen node before the node was chosen."""
        self.num_workers = 0

    def fill(self, place: Place, num_workers: int) -> None:
        """Choose slots for `num_workers` in a place with enough free capacity."""
        while num_workers:
            if isinstance(place, str):
                self._choose(place, num_workers)
                return
            inner = self._placement.narrowest(place, num_workers)
            if inner is not None:
                place = inner
                continue
            part = self._placement.largest(place)
            there = self._placement.capacity(part)
            self.fill(part, there)
            num_workers -= there

    def fill_up(self, num_workers: int) -> None:
        """Choose slots for `num_workers` on the nodes that were chosen before."""
        for part in self._slices[:]:
            number = min(num_workers, self._before[part.node_id] - part.num_workers)
            if number > 0:
                self._slices.append(Slice(part.node_id, number))
                self.num_workers += number
                num_workers -= number

    def finish(self) -> tuple[Slice, ...]:
        for node_id, size in self._before.items():
            self._placement.change(node_id, size)
        return tuple(self._slices)

    def _choose(self, node_id: str, num_workers: int) -> None:
        self._before[node_id] = self._placement.capacity(node_id)
        self._slices.append(Slice(node_id, num_workers))
        self._placement.change(node_id, 0)
        self.num_workers += num_workers
