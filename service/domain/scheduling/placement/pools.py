"""Counts how many workers of each kind fit in the free resources of the nodes.

Capacity is counted per group of equivalent nodes (`stock`). The amount set aside for waiting jobs
is the same on all nodes that are equal when empty, so it is stored once for all of them. If no
worker fits even on an empty node after this amount is subtracted, the free resources are not
checked. Capacity is counted per domain (`placement`) only when a gang is placed or must be within
one domain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import WorkerKind
from service.domain.scheduling.placement.node_kinds import Amounts, ByCell, NodeKinds, times_on
from service.domain.scheduling.placement.placement import Placement
from service.domain.scheduling.placement.slots import Request, count, spares_last
from service.domain.scheduling.placement.stock import Free, NodeGroup, Stock, When, plus
from service.domain.scheduling.placement.topology import Place

NONE_DIFFER: Mapping[str, Amounts] = MappingProxyType({})


class Reserved:
    """Resources that are set aside on nodes for waiting jobs. The amounts only grow."""

    def __init__(self, stock: Stock) -> None:
        self._kinds = stock.kinds
        self._workers: dict[WorkerKind, int] = {}
        self._whole: set[WorkerKind] = set()
        """Kinds for which all slots of all nodes are set aside."""
        self.on = [(0.0,) * len(total) for total in stock.kinds.totals]
        """Reserved amounts, keyed by kind of node."""
        self.version = 0

    def set_aside(self, kind: WorkerKind, num_workers: int) -> None:
        """Set aside as many slots on each node as these workers could use if the node were empty.
        The amount set aside for one kind never exceeds the resources of the node."""
        if kind in self._whole:
            return
        if kind.heterogeneous is not None:
            self._set_aside_heterogeneous(kind, kind.heterogeneous)
            return
        before = self._workers.get(kind, 0)
        self._workers[kind] = before + num_workers
        if before + num_workers >= self._kinds.largest(kind):
            self._whole.add(kind)
        sums: dict[tuple[Amounts, int], Amounts] = {}
        for at, most in enumerate(self._kinds.capacity(kind)):
            if most > before:
                number = min(most, before + num_workers) - before
                key = self.on[at], number
                if key not in sums:
                    sums[key] = plus(self.on[at], kind.vector, number)
                self.on[at] = sums[key]
                self.version += 1

    def _set_aside_heterogeneous(self, kind: WorkerKind, request: Request) -> None:
        """Set aside slots for a gang with heterogeneous slots, like `set_aside`."""
        sorts = [(kind.vector, request.num_alike)]
        sorts += ((kind.role_vectors[role.first_rank], role.number) for role in request.roles)
        for at, total in enumerate(self._kinds.totals):
            if not kind.fits(total):
                continue
            for vector, most in sorts:
                number = min(most, times_on(vector, total))
                self.on[at] = plus(self.on[at], vector, number)
        self.version += 1
        if not self.leaves(kind):
            self._whole.add(kind)

    def leaves(self, kind: WorkerKind) -> bool:
        """Whether a worker of this kind fits on an empty node in addition to the reserved
        amounts."""
        return any(map(kind.fits, self._kinds.totals, self.on))


class Pool:
    """The resources that certain jobs are allowed to take: free resources minus reserved resources.
    The difference can be negative."""

    def __init__(self, stock: Stock, when: When, reserved: Reserved | None = None) -> None:
        self.stock = stock
        self._when = when
        self._free = stock.by_when[when]
        self._reserved = reserved or Reserved(stock)
        self._capacities: dict[WorkerKind, _Capacity] = {}

    def capacity(self, kind: WorkerKind) -> int:
        """Return how many workers of this kind fit in the domain with the most free capacity, among
        the domains that can hold their gang."""
        return self._exact(kind).most()

    def total(self, kind: WorkerKind) -> int:
        """Return how many workers of this kind fit in the cluster, regardless of the domains that a
        gang requires."""
        return self._exact(kind).total

    def whole_capacity(self, kind: WorkerKind, free: Mapping[str, Amounts]) -> int:
        """Like `capacity`, for a gang that must be placed all at once. `free` contains the nodes
        whose free resources are assumed to differ."""
        return count(self._exact(kind).place_whole(free))

    def closed(self, kind: WorkerKind) -> int:
        """Return how many workers of this kind would fit on nodes with silos' data if these nodes
        accepted them."""
        if not self.stock.kinds.has_closed:
            return 0
        groups = self._free.groups.values()
        as_open = ((self.stock.kinds.as_open(group.amounts), len(group.nodes)) for group in groups)
        return sum(kind.fits(amounts) * number for amounts, number in as_open if amounts)

    def reserved(self, kind: WorkerKind) -> tuple[int, int]:
        """Return how many workers of this kind fit on reserved nodes that these workers can't use,
        and the cells in which they fit (`Fence`)."""
        if kind.fence is None:
            return 0, 0
        anywhere = self._exact(kind.anywhere)
        return anywhere.within(kind.fence.reserved), anywhere.cells

    def capacities(self, kind: WorkerKind) -> dict[Place, int]:
        """Return how many such workers fit in each part of the cluster that can hold a gang of
        them."""
        return self._exact(kind).capacities()

    def has(self, kind: WorkerKind, num_workers: int) -> bool:
        """Whether `num_workers` workers fit. If they don't fit, the check is fast as long as no
        resources were added since the last count, because that count is an upper bound."""
        capacity = self._capacities.get(kind)
        is_bound = capacity is not None and capacity.num_grown == self._free.num_grown
        if capacity is not None and is_bound and capacity.bound < num_workers:
            return False
        bare = kind.anywhere
        if bare is not kind and not kind.is_whole and not self.has(bare, num_workers):
            return False  # this check is fast, because many fences have the same `anywhere`
        capacity = self._exact(kind)
        return capacity.bound >= num_workers and capacity.most() >= num_workers

    def pack_most(
        self, kind: WorkerKind, least: int, most: int, request: Request | None = None
    ) -> tuple[Slice, ...] | None:
        """Return slices for up to `most` workers, placed close to each other (`placement`); None if
        fewer than `least` workers fit.

        With `request`, the number of workers is one of the sizes that the request allows
        (`Request.rounded_down`), and `least` must be such a size. Its spares are last, and on other
        nodes if possible, unless the gang must be within one domain."""
        if not self.has(kind, least):
            return None
        capacity = self._exact(kind)
        if kind.is_whole:
            return capacity.place_whole()
        number, num_spares = min(capacity.most(), most), 0
        if request is not None:
            number = request.rounded_down(number)
            num_spares = max(0, number - request.num_ranks)
        num_apart = num_spares if kind.required is None else 0
        slices = capacity.placement.pack(number, num_apart=num_apart)
        return spares_last(slices, num_spares)

    def pack_near(
        self,
        job_id: str,
        kind: WorkerKind,
        least: int,
        most: int,
        held: Sequence[Slice],
        request: Request | None = None,
    ) -> tuple[Slice, ...] | None:
        """Return slices like `pack_most`, but close to the slots that the group already holds. With
        `request`, the group then has one of the sizes that the request allows. If the group lacks
        only spares, return slices on other nodes if possible."""
        if not self.has(kind, least):
            return None
        capacity, num_held = self.capacity_near(job_id, kind, held), count(held)
        found, num_spares = min(most, capacity), 0
        if request is not None:
            found = request.rounded_down(num_held + found) - num_held
            num_spares = min(found, max(0, num_held + found - request.num_ranks))
        if found < least:
            return None
        placement, near = self._exact(kind).placement, self._that_are_there(held)
        too_many = self._too_many(job_id, kind, held)
        if found == num_spares and kind.required is None:
            there = {name: placement.capacity(name) for name in near}
            if elsewhere := capacity - sum(there.values()) + sum(too_many.get(n, 0) for n in near):
                too_many |= there
                found, near = min(found, elsewhere), []
        for node_id, number in too_many.items():
            placement.change(node_id, placement.capacity(node_id) - number)
        slices = placement.pack(found, near)
        for node_id, number in too_many.items():
            placement.change(node_id, placement.capacity(node_id) + number)
        return spares_last(slices, min(num_spares, found))

    def capacity_near(self, job_id: str, kind: WorkerKind, held: Sequence[Slice]) -> int:
        """Return how many more workers can join a group that holds these slots."""
        capacity, near = self._exact(kind), self._that_are_there(held)
        too_many = sum(self._too_many(job_id, kind, held).values())
        if kind.required is None or not held:
            return capacity.most() - too_many
        return capacity.capacities().get(self.place_of(kind, near[0]), 0) - too_many if near else 0

    def _too_many(self, job_id: str, kind: WorkerKind, held: Sequence[Slice]) -> dict[str, int]:
        """Return, for each node, the number of workers that would fit but must not be added,
        because they would share a GPU with another worker of their group."""
        most = self.stock.most_more(self._when, job_id, kind, held)
        if not most:
            return {}
        placement = self._exact(kind).placement
        return {name: max(0, placement.capacity(name) - number) for name, number in most.items()}

    def pack_within(self, kind: WorkerKind, num_workers: int, place: Place) -> tuple[Slice, ...]:
        """Return slices for `num_workers` in a place that has enough room according to
        `capacities`."""
        return self._exact(kind).placement.pack(num_workers, within=place) if num_workers else ()

    def at(self, node_id: str) -> tuple[Amounts, Amounts] | None:
        """Return a node's free resources and the amounts set aside on it; None if the node is
        missing."""
        group = self._free.group_of.get(node_id)
        return None if group is None else (group.amounts, self._reserved.on[group.kind])

    def place_of(self, kind: WorkerKind, node_id: str) -> Place:
        """Return the result of `NodeKinds.place_of` for the requirement of this kind of worker."""
        return self.stock.kinds.place_of(node_id, kind.required)

    def _that_are_there(self, slices: Sequence[Slice]) -> list[str]:
        return [part.node_id for part in slices if part.node_id in self.stock.kinds.of_node]

    def _exact(self, kind: WorkerKind) -> _Capacity:
        capacity = self._capacities.get(kind)
        if capacity is None:
            anywhere = None if kind.anywhere is kind else self._exact(kind.anywhere)
            capacity = self._capacities[kind] = _Capacity(
                kind, self.stock.kinds, self._free, self._reserved, anywhere
            )
        capacity.catch_up()
        return capacity


class _Capacity:
    """The free capacity for workers of one kind, updated incrementally."""

    def __init__(
        self,
        kind: WorkerKind,
        kinds: NodeKinds,
        free: Free,
        reserved: Reserved,
        anywhere: _Capacity | None,
    ) -> None:
        """`anywhere` is the capacity for the same workers without their fence; None if they have no
        fence."""
        self._kind = kind
        self._anywhere = anywhere
        self._closed = 0 if kind.fence is None else kind.fence.closed
        self._kinds = kinds
        self._free = free
        self._reserved = reserved
        self._version = -1
        self._num_moves = 0
        """Number of moves (`Free.moves`) that `total` accounts for."""
        self.num_grown = 0
        self._size_of: dict[NodeGroup, int] = {}
        """The capacity of each node of a group."""
        self.total = 0
        """The total capacity of all nodes."""
        self.bound = 0
        """Upper bound of `most()`, unless resources were added since it was set."""
        self._is_exact = False
        """Whether `bound` equals `most()`."""
        self._is_closed = False
        """Whether too little is left for a worker, even on an empty node."""
        self._by_cell: ByCell | None = None
        self._placement: Placement | None = None
        self._num_placed = 0
        """Number of moves (`Free.moves`) that have been applied to the placement."""

    def catch_up(self) -> None:
        free, is_first = self._free, self._version < 0
        if self._is_closed and not free.exceeds_total:
            self.num_grown = free.num_grown
            return
        if self._anywhere is not None:
            self._anywhere.catch_up()
        if self._version != self._reserved.version:
            self._count()
        elif self._num_moves == len(free.moves):
            return
        elif self._anywhere is None:
            self.total += self._gained(free.moves[self._num_moves :])
        if self._anywhere is not None:
            self.total = self._anywhere.within(~self._closed)
        self._is_exact = self._kind.required is None and not self._kind.is_whole
        is_anew = self._is_exact or is_first or self.num_grown != free.num_grown
        self.bound = self.total if is_anew else min(self.bound, self.total)
        self._num_moves, self.num_grown = len(free.moves), free.num_grown

    def _count(self) -> None:
        self._version, self._placement, self._by_cell = self._reserved.version, None, None
        if self._anywhere is not None:
            return
        self._is_closed = not self._reserved.leaves(self._kind)
        if self._is_closed and not self._free.exceeds_total:
            self._size_of, self.total = {}, 0
            self._version = -1  # count again once a node has more free resources than its total
            return
        # A group that had no free capacity still has none, because reserved amounts only grow.
        self._size_of = {group: 0 for group, size in self._size_of.items() if not size}
        self.total = sum([self._size(g) * len(g.nodes) for g in self._free.groups.values()])

    def most(self) -> int:
        """Like `Pool.capacity`."""
        if not self._is_exact:
            self.bound, self._is_exact = max(self.capacities().values(), default=0), True
        return self.bound

    def capacities(self) -> dict[Place, int]:
        """Return the capacity of each part of the cluster that can hold a gang."""
        required, topology = self._kind.required, self._kinds.topology
        if self._kind.is_whole:
            return {topology.cluster: count(self.place_whole())}
        if required is None:
            return {topology.cluster: self.total}
        return self.placement.capacities(required.level) if topology.has(required.level) else {}

    def place_whole(self, free: Mapping[str, Amounts] = NONE_DIFFER) -> tuple[Slice, ...]:
        """Like `NodeKinds.place_whole`, for the resources that are free and not set aside. `free`
        contains the nodes whose free resources are assumed to differ."""
        left: dict[str, Amounts] = {}
        for group in self._free.groups.values():
            aside = self._reserved.on[group.kind]
            left |= dict.fromkeys(group.nodes, plus(group.amounts, aside, -1))
            for node_id in group.nodes & free.keys():
                left[node_id] = plus(free[node_id], aside, -1)
        return self._kinds.place_whole(self._kind, left)

    @property
    def placement(self) -> Placement:
        """How many workers currently fit on each node and in each domain."""
        moves = self._free.moves
        if self._placement is None:
            bare, closed = self._anywhere or self, self._closed
            sizes = [
                (size, group.nodes)
                for group, size in bare._size_of.items()
                if size and not closed >> self._kinds.cells[group.kind] & 1
            ]
            there = {name: size for size, nodes in sizes for name in nodes}
            self._placement = Placement(self._kinds.topology, there)
        elif self._num_placed < len(moves):
            newest = {node_id: group for node_id, _, group in moves[self._num_placed :]}
            for node_id, group in newest.items():
                self._placement.change(node_id, self._size(group))
        self._num_placed = len(moves)
        return self._placement

    def _gained(self, moves: Sequence[tuple[str, NodeGroup, NodeGroup]]) -> int:
        """Return how many more workers fit after these moves."""
        sizes, gained, by_cell = self._size_of, 0, self._by_cell
        for _, left, joined in moves:
            try:
                more = sizes[joined] - sizes[left]
            except KeyError:  # a group that was not counted before
                more = self._size(joined) - self._size(left)
            gained += more
            if by_cell is not None and more:
                by_cell.add(self._kinds.cells[joined.kind], more)
        return gained

    def within(self, cells: int) -> int:
        """Return how many workers fit in a set of cells (`Fence`)."""
        return self._of_cells().within(cells) if self.total else 0

    @property
    def cells(self) -> int:
        """The cells in which a worker fits."""
        return self._of_cells().cells if self.total else 0

    def _of_cells(self) -> ByCell:
        if self._by_cell is None:
            self._by_cell = ByCell()
            for group in self._free.groups.values():
                if size := self._size(group):
                    cell = self._kinds.cells[group.kind]
                    self._by_cell.add(cell, size * len(group.nodes))
        return self._by_cell

    def _size(self, group: NodeGroup) -> int:
        if self._anywhere is not None:
            is_closed = self._closed >> self._kinds.cells[group.kind] & 1
            return 0 if is_closed else self._anywhere._size(group)
        size = self._size_of.get(group)
        if size is None:
            aside = self._reserved.on[group.kind]
            size = self._size_of[group] = self._kind.fits(group.amounts, aside)
        return size


def pack_later(
    stock: Stock, kind: WorkerKind, num_workers: int, closed: Collection[str]
) -> tuple[Slice, ...] | None:
    """Return slots that are free LATER, on nodes that are not in `closed`; None if there are too
    few."""
    later = stock.by_when[When.LATER]
    before = {n: later.group_of[n].amounts for n in closed if n in later.group_of}
    for node_id, amounts in before.items():
        later.set(node_id, (0.0,) * len(amounts))
    found = Pool(stock, When.LATER).pack_most(kind, num_workers, num_workers)
    for node_id, amounts in before.items():
        later.set(node_id, amounts)
    return found


class Offer:
    """The slots that a class of jobs is allowed to take, now and after other jobs have left."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.reserved = Reserved(stock)
        self.now = Pool(stock, When.NOW, self.reserved)
        self.soon = Pool(stock, When.SOON, self.reserved)
        self.keeps_for_later = False

    def keep_for_later(self) -> None:
        """Exclude the slots that are reserved by `Stock.reserve`."""
        self.keeps_for_later = True
        self.now = Pool(self._stock, When.NOW_AND_LATER, self.reserved)
        self.soon = Pool(self._stock, When.SOON_AND_LATER, self.reserved)
