"""The kinds of nodes, and how many workers fit on empty nodes.

Nodes of the same kind have equal resources, are in the same cell, and can hold the same gangs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence

from ray_workers.shared.slices import Slice
from service.config.node_types import CELL, OPEN
from service.domain.scheduling.placement.gangs import Gangs, Requirement, WorkerKind
from service.domain.scheduling.placement.heterogeneous import place_heterogeneous
from service.domain.scheduling.placement.pinned_nodes import place_pinned
from service.domain.scheduling.placement.slots import EPSILON, Node, count
from service.domain.scheduling.placement.topology import Domain, Place, Topology

Amounts = tuple[float, ...]
"""The amount of each resource, in the order of `Gangs.names`."""
_Spot = tuple[Amounts, Domain]
"""The resources of an empty node, and the narrowest domain that contains the node."""


class ByCell:
    """The number of workers that fit in each cell (`Fence`)."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._cells: dict[int, int] = {}
        """The cells with each number of workers."""

    def add(self, cell: int, number: int) -> None:
        before, bit = self._numbers.get(cell, 0), 1 << cell
        after = self._numbers[cell] = before + number
        self._cells[before] = self._cells.get(before, 0) & ~bit
        self._cells[after] = self._cells.get(after, 0) | bit

    def within(self, cells: int) -> int:
        """Return how many workers fit in a set of cells."""
        return sum([number * (at & cells).bit_count() for number, at in self._cells.items()])

    @property
    def cells(self) -> int:
        """The cells with room for at least one worker."""
        return functools.reduce(operator.or_, (at for n, at in self._cells.items() if n), 0)


class NodeKinds:
    """The nodes of one plan, by kind."""

    def __init__(self, nodes: Sequence[Node], gangs: Gangs, topology: Topology) -> None:
        """`gangs` must contain all gangs whose jobs will request slots. `topology` can contain
        additional nodes."""
        self.topology = topology
        self.of_node: dict[str, int] = {}
        """The kind of each node, keyed by node id."""
        self.totals: list[Amounts] = []
        """Resources of an empty node of each kind."""
        self._numbers: list[int] = []
        """The number of nodes of each kind."""
        self._index_of_name = {name: at for at, name in enumerate(gangs.names)}
        self._capacity: dict[WorkerKind, Sequence[int]] = {}
        self._largest: dict[WorkerKind, int] = {}
        self._whole: dict[WorkerKind, int] = {}
        self._whole_by_cell: dict[WorkerKind, ByCell] = {}
        self._suitable: dict[WorkerKind, int] = {}
        self._sort(nodes, gangs)

    def _sort(self, nodes: Sequence[Node], gangs: Gangs) -> None:
        """Determine the kinds of nodes. Nodes with equal resources are of different kinds if a gang
        could use the domain of only one of them."""
        spots = [(gangs.vector(node.total), self.topology.domain_of[node.id]) for node in nodes]
        numbers = Counter(spots) if gangs.required else {}
        usable = {kind: self._usable(kind, numbers) for kind in gangs.required}
        capacity: dict[WorkerKind, list[int]] = {kind: [] for kind in usable}
        kinds: dict[tuple[Amounts, tuple[bool, ...]], int] = {}
        for node, spot in zip(nodes, spots, strict=True):
            could = tuple([spot in there for there in usable.values()])
            number = kinds.setdefault((spot[0], could), len(kinds))
            if number == len(self.totals):
                self.totals.append(spot[0])
                self._numbers.append(0)
                for kind, there in usable.items():
                    capacity[kind].append(kind.fits(spot[0]) if spot in there else 0)
            self._numbers[number] += 1
            self.of_node[node.id] = number
        self._capacity.update(capacity)
        at = self._index_of_name.get(CELL)
        self.cells = [0 if at is None else int(total[at]) for total in self.totals]
        self._num_cells = max(self.cells, default=0) + 1
        without_cells: dict[object, int] = {}
        self._bits: list[int] = []
        for (total, could), cell in zip(kinds, self.cells, strict=True):
            rest = total if at is None else (*total[:at], *total[at + 1 :])
            number = without_cells.setdefault((rest, could), len(without_cells))
            self._bits.append(1 << number * self._num_cells + cell)
        self._first_cells = sum(1 << at * self._num_cells for at in range(len(without_cells)))

    def _usable(self, kind: WorkerKind, spots: Mapping[_Spot, int]) -> set[_Spot]:
        """Return the spots in the domains that, when empty, could hold the whole gang; an empty set
        if the gang has no requirement. Also stores in `_whole` how many workers of the gang fit in
        the largest domain."""
        required = kind.required
        if required is None or not self.topology.has(required.level):
            self._whole[kind] = 0
            return set()
        around = self.topology.of_level(required.level).around
        alone = {spot: kind.fits(spot[0]) for spot in spots}
        capacities: Counter[Domain | None] = Counter()
        for spot, number in spots.items():
            capacities[around[spot[1]]] += alone[spot] * number
        del capacities[None]  # nodes that are in no domain of the level
        self._whole[kind] = max([*capacities.values(), *alone.values()], default=0)
        return {
            spot
            for spot in spots
            if alone[spot] >= required.least or capacities[around[spot[1]]] >= required.least
        }

    def place_of(self, node_id: str, required: Requirement | None) -> Place:
        """Return the place that contains the node and that a gang can use: the cluster, or the
        node's domain of the required level."""
        if required is None or not self.topology.has(required.level):
            return self.topology.cluster
        return self.topology.place_of(node_id, required.level)

    def bit_of(self, node_id: str) -> int:
        """Return the kind of the node as a bit. In a set of kinds of nodes, which is stored as
        bits, the kinds that differ only in their cells have adjacent bits, in the order of the
        cells."""
        return self._bits[self.of_node[node_id]]

    def suitable(self, kind: WorkerKind) -> int:
        """Return the kinds of nodes on which `capacity` is not 0, as bits."""
        found = self._suitable.get(kind)
        if found is None and kind.fence is not None and kind.required is None:
            cells = ~kind.fence.closed & ((1 << self._num_cells) - 1)
            found = cells * self._first_cells & self.suitable(kind.anywhere)
            self._suitable[kind] = found
        elif found is None:
            numbers = zip(self.capacity(kind), self._bits, strict=True)
            found = self._suitable[kind] = sum(bit for number, bit in numbers if number)
        return found

    def capacity(self, kind: WorkerKind) -> Sequence[int]:
        """Return how many such workers fit on an empty node, by kind of node. For a gang that must
        be in one domain, the number is 0 for nodes whose domains are too small."""
        found = self._capacity.get(kind)
        if found is None:
            if kind.fence is None:
                found = tuple([kind.fits(total) for total in self.totals])
            else:
                closed, numbers = kind.fence.closed, self.capacity(kind.anywhere)
                of_cells = zip(numbers, self.cells, strict=True)
                found = tuple([0 if closed >> cell & 1 else number for number, cell in of_cells])
            self._capacity[kind] = found
        return found

    def whole_by_cell(self, kind: WorkerKind) -> ByCell:
        """Return how many such workers fit in each cell of an empty cluster, for gangs that need
        not be in one domain."""
        found = self._whole_by_cell.get(kind)
        if found is None:
            found = self._whole_by_cell[kind] = ByCell()
            for at, number in enumerate(self.capacity(kind)):
                found.add(self.cells[at], number * self._numbers[at])
        return found

    def largest(self, kind: WorkerKind) -> int:
        """Return how many such workers fit on the largest node when it is empty."""
        found = self._largest.get(kind)
        if found is None:
            found = self._largest[kind] = max(self.capacity(kind), default=0)
        return found

    def whole(self, kind: WorkerKind) -> int:
        """Return how many workers of this kind, in one gang, fit in an empty cluster."""
        found = self._whole.get(kind)
        if found is None and kind.is_whole:
            amounts = {node_id: self.totals[number] for node_id, number in self.of_node.items()}
            found = self._whole[kind] = count(self.place_whole(kind, amounts))
        elif found is None and kind.fence is not None:
            found = self.whole_by_cell(kind.anywhere).within(~kind.fence.closed)
            self._whole[kind] = found
        elif found is None:
            of_nodes = zip(self.capacity(kind), self._numbers, strict=True)
            found = self._whole[kind] = sum([each * number for each, number in of_nodes])
        return found

    def place_whole(self, kind: WorkerKind, amounts: Mapping[str, Amounts]) -> tuple[Slice, ...]:
        """Return the slices of a gang that must be placed all at once; an empty tuple if a worker
        does not fit. `amounts` contains the free resources of each node."""
        if kind.heterogeneous is None:
            capacities = {node_id: kind.fits(has) for node_id, has in amounts.items()}
            found = place_pinned(kind.homes, capacities, self._has_labels, self._is_open)
            return () if isinstance(found, int) else found
        names, kept = self._index_of_name, kind.fence.nodes if kind.fence else ()
        free = {
            n: dict(zip(names, has, strict=True)) for n, has in amounts.items() if n not in kept
        }
        return place_heterogeneous(kind.heterogeneous, free, self.topology)

    def _has_labels(self, node_id: str, labels: Sequence[str]) -> bool:
        total = self.totals[self.of_node[node_id]]
        return all(total[self._index_of_name[label]] > 0 for label in labels)

    def _is_open(self, node_id: str) -> bool:
        at = self._index_of_name.get(OPEN)
        return at is None or self.totals[self.of_node[node_id]][at] > 0

    @property
    def has_closed(self) -> bool:
        """Whether some nodes accept only ranks of silos."""
        return OPEN in self._index_of_name

    def as_open(self, amounts: Amounts) -> Amounts | None:
        """Return the resources of a closed node as if it were open; None if it is open."""
        at = self._index_of_name.get(OPEN)
        if at is None or amounts[at] > 0:
            return None
        return (*amounts[:at], math.inf, *amounts[at + 1 :])


def times_on(vector: Amounts, total: Amounts) -> int:
    """Return how many times the vector fits into a node's total."""
    return math.floor(
        min(((has + EPSILON) / each for each, has in zip(vector, total, strict=True) if each > 0))
    )
