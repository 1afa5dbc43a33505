"""Free resources of nodes, and the room that they have for workers of each kind.

Nodes of one kind with the same free resources are one group, and room is counted by group: most of
a large cluster's nodes are of few kinds, and either empty or full. The amount that is set aside for
waiting jobs is the same on all nodes that are equal when they are empty: one number for all of
these. Once it leaves nothing of an empty node, no node needs to be looked at any more.
Only where a gang is placed, or must be within one domain, is the room counted by domain
(`placement`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from ray_workers.shared.contracts import Slice
from service.config.node_types import OPEN
from service.domain.scheduling.placement.gangs import Gangs, Requirement, WorkerKind
from service.domain.scheduling.placement.homes import at_home
from service.domain.scheduling.placement.placement import Placement
from service.domain.scheduling.placement.shared_gpus import (
    Parts,
    SharedGpus,
    parts_on,
    with_more,
    without_parts,
)
from service.domain.scheduling.placement.slots import (
    EPSILON,
    WHOLE_GPUS,
    Holder,
    Node,
    Request,
    count,
    is_part_of_gpu,
)
from service.domain.scheduling.placement.topology import Domain, Place, Topology
from service.domain.scheduling.placement.unlike import place_unlike

Amounts = tuple[float, ...]
"""Of each resource, in the order of `Gangs.names`."""


class When(IntEnum):
    """The kind of free resources of a node that is meant."""

    FREE = 0
    """Those that nobody holds."""
    NOW = 1
    """Those of them that are promised to nobody."""
    SOON = 2
    """As NOW, once all jobs have left that were asked to."""


_Spot = tuple[Amounts, Domain]
"""Nodes with these resources when they are empty, directly in this domain."""


class _Group:
    """Nodes of one kind with the same free resources."""

    __slots__ = ("amounts", "kind", "nodes")

    def __init__(self, kind: int, amounts: Amounts) -> None:
        self.kind = kind
        """Of the nodes, by what they have when they are empty."""
        self.amounts = amounts
        """Below zero where more is promised."""
        self.nodes: set[str] = set()


class _Free:
    """The free resources of all nodes, of one kind (`When`)."""

    def __init__(
        self, nodes: Iterable[tuple[str, int, Amounts]], totals: Sequence[Amounts]
    ) -> None:
        """nodes: their ids, kinds and resources. totals: of empty nodes, by kind."""
        self._totals = totals
        self.exceeds_total = False
        """Whether a node may have more than when it is empty. Shared GPUs are counted so that
        some do."""
        self.groups: dict[tuple[int, Amounts], _Group] = {}
        self.group_of: dict[str, _Group] = {}
        self.moves: list[tuple[str, _Group, _Group]] = []
        """Nodes that have changed, with the groups that they left and joined."""
        self.num_grown = 0
        """How often resources were added."""
        for node_id, kind, amounts in nodes:
            self._join(node_id, kind, amounts)

    def set(self, node_id: str, amounts: Amounts) -> None:
        left = self.group_of[node_id]
        if left.amounts == amounts:
            return
        left.nodes.remove(node_id)
        if not left.nodes:
            del self.groups[left.kind, left.amounts]
        self.moves.append((node_id, left, self._join(node_id, left.kind, amounts)))

    def _join(self, node_id: str, kind: int, amounts: Amounts) -> _Group:
        group = self.groups.get((kind, amounts))
        if group is None:
            group = self.groups[kind, amounts] = _Group(kind, amounts)
            total = self._totals[kind]
            if any(most + EPSILON < each for most, each in zip(total, amounts, strict=True)):
                self.exceeds_total = True
        group.nodes.add(node_id)
        self.group_of[node_id] = group
        return group


class Stock:
    """The resources of all nodes while one plan is made."""

    def __init__(
        self,
        nodes: Sequence[Node],
        gangs: Gangs,
        topology: Topology,
        holders: Sequence[Holder] = (),
    ) -> None:
        """gangs: with all whose jobs will ask. topology: of these nodes, and perhaps of others.
        holders: what is to be expected to be free is theirs."""
        self.topology = topology
        self._holders = holders
        self._shared = SharedGpus(gangs.names, gangs.parts) if WHOLE_GPUS in gangs.names else None
        """None where no GPU is shared."""
        self._parts: dict[tuple[When, str], list[tuple[float, int]]] = {}
        """By node, the parts of GPUs that jobs have, or will have."""
        self.kind_of: dict[str, int] = {}
        """By node."""
        self.totals: list[Amounts] = []
        """By kind of node."""
        self.counts: list[int] = []
        self._place_of_name = {name: at for at, name in enumerate(gangs.names)}
        self._capacity: dict[WorkerKind, Sequence[int]] = {}
        self._largest: dict[WorkerKind, int] = {}
        self._whole: dict[WorkerKind, int] = {}
        self._sort(nodes, gangs)
        free = [(n.id, self.kind_of[n.id], self._free_on(n, gangs)) for n in nodes]
        self.by_when = tuple(_Free(free, self.totals) for _ in When)
        self._now, self._soon = self.by_when[When.NOW], self.by_when[When.SOON]

    def _free_on(self, node: Node, gangs: Gangs) -> Amounts:
        free = gangs.vector(node.available_to_us)
        if self._shared is None or WHOLE_GPUS not in node.available_to_us:
            return free
        return self._shared.exact(free, self.parts(When.FREE, node.id))

    def parts(self, when: When, node_id: str) -> list[tuple[float, int]]:
        """The parts of GPUs that jobs have on a node, or will have."""
        if self._shared is None:
            return []
        found = self._parts.get((when, node_id))
        if found is None:
            found = self._parts[when, node_id] = parts_on(node_id, self._holders)
        return found

    def given_back(
        self,
        amounts: Sequence[float],
        vector: Sequence[float],
        part: Slice,
        parts: Parts,
        sign: int = 1,
        had: int = 0,
        is_again: bool = False,
    ) -> tuple[Amounts, list[tuple[float, int]]]:
        """The amounts of a node on which these slots are left, and its parts of GPUs then; with
        sign -1, on which they are taken. vector: of a worker. parts: of GPUs, before it. had:
        workers with such parts that the job has there before it. is_again: its parts are where they
        were in the order."""
        found = _plus(tuple(amounts), tuple(vector), sign * part.num_workers)
        size = 0.0 if self._shared is None else vector[self._shared.gpu_at]
        if self._shared is None or not 0 < size < 1:
            return found, list(parts)
        if sign > 0:
            after = without_parts(parts, size, part.num_workers, had)
        else:
            after = with_more(parts, size, had, part.num_workers)
            after = sorted(after, reverse=True) if is_again else after
        plain = tuple(
            before if at in self._shared.places else each
            for at, (before, each) in enumerate(zip(amounts, found, strict=True))
        )
        return self._shared.changed(plain, parts, after), after

    def _sort(self, nodes: Sequence[Node], gangs: Gangs) -> None:
        """Find the kinds of nodes. Those in a domain that is too small for some gang differ from
        those that it could use."""
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
                self.counts.append(0)
                for kind, there in usable.items():
                    capacity[kind].append(kind.fits(spot[0]) if spot in there else 0)
            self.counts[number] += 1
            self.kind_of[node.id] = number
        self._capacity.update(capacity)

    def _usable(self, kind: WorkerKind, spots: Mapping[_Spot, int]) -> set[_Spot]:
        """Those in domains that could hold a gang with a requirement if they were empty. Notes how
        many of its workers the largest domain has room for."""
        required = kind.required
        if required is None or not self.topology.has(required.level):
            self._whole[kind] = 0
            return set()
        around = self.topology.of_level(required.level).around
        alone = {spot: kind.fits(spot[0]) for spot in spots}
        rooms: Counter[Domain | None] = Counter()
        for spot, number in spots.items():
            rooms[around[spot[1]]] += alone[spot] * number
        del rooms[None]  # nodes that are in no domain of the level
        self._whole[kind] = max([*rooms.values(), *alone.values()], default=0)
        return {
            spot
            for spot in spots
            if alone[spot] >= required.least or rooms[around[spot[1]]] >= required.least
        }

    def place_of(self, node_id: str, required: Requirement | None) -> Place:
        """The part of the cluster with the node that may hold a gang."""
        if required is None or not self.topology.has(required.level):
            return self.topology.cluster
        return self.topology.place_of(node_id, required.level)

    def capacity(self, kind: WorkerKind) -> Sequence[int]:
        """How many such workers an empty node has room for, by kind of node. Of a gang that must be
        in one domain: none on nodes of which no domain is large enough."""
        found = self._capacity.get(kind)
        if found is None:
            found = self._capacity[kind] = tuple(kind.fits(total) for total in self.totals)
        return found

    def largest(self, kind: WorkerKind) -> int:
        """How many such workers the largest node has room for when it is empty."""
        found = self._largest.get(kind)
        if found is None:
            found = self._largest[kind] = max(self.capacity(kind), default=0)
        return found

    def whole(self, kind: WorkerKind) -> int:
        """How many such workers the empty cluster has room for, where they may be together."""
        found = self._whole.get(kind)
        if found is None and kind.is_whole:
            amounts = {node_id: self.totals[number] for node_id, number in self.kind_of.items()}
            found = self._whole[kind] = count(self.place_whole(kind, amounts))
        elif found is None:
            of_nodes = zip(self.capacity(kind), self.counts, strict=True)
            found = self._whole[kind] = sum([each * number for each, number in of_nodes])
        return found

    def place_whole(self, kind: WorkerKind, amounts: Mapping[str, Amounts]) -> tuple[Slice, ...]:
        """The slices of a gang that is placed as a whole; none if a worker has no room. amounts: of
        what the nodes have, by node."""
        if kind.unlike is None:
            rooms = {node_id: kind.fits(has) for node_id, has in amounts.items()}
            found = at_home(kind.homes, rooms, self._has_labels, self._is_open)
            return () if isinstance(found, int) else found
        names = self._place_of_name
        free = {node_id: dict(zip(names, has, strict=True)) for node_id, has in amounts.items()}
        return place_unlike(kind.unlike, free, self.topology)

    def _has_labels(self, node_id: str, labels: Sequence[str]) -> bool:
        total = self.totals[self.kind_of[node_id]]
        return all(total[self._place_of_name[label]] > 0 for label in labels)

    def _is_open(self, node_id: str) -> bool:
        at = self._place_of_name.get(OPEN)
        return at is None or self.totals[self.kind_of[node_id]][at] > 0

    def as_open(self, amounts: Amounts) -> Amounts | None:
        """The resources of a closed node as if it were open; None of an open one."""
        at = self._place_of_name.get(OPEN)
        if at is None or amounts[at] > 0:
            return None
        return (*amounts[:at], math.inf, *amounts[at + 1 :])

    def take(self, kind: WorkerKind, slices: Sequence[Slice], held: Sequence[Slice] = ()) -> None:
        """A job holds these slots from now on. held: those that it had before."""
        for part, vector, had in self._one_by_one(kind, slices, held):
            if part.node_id in self.kind_of:
                for when in When:
                    self._occupy(when, part, vector, had)
                if self._shared is not None:
                    self._cap(part.node_id, self.by_when[When.FREE])
                    self._cap(part.node_id, self._soon)

    def _one_by_one(
        self, kind: WorkerKind, slices: Sequence[Slice], held: Sequence[Slice] = ()
    ) -> Iterator[tuple[Slice, Amounts, int]]:
        """Slices with the vector of their workers, and how many workers with parts of GPUs the job
        has on the node before."""
        had = _by_node(held)
        for part, vector in kind.vectors(slices):
            yield part, vector, had[part.node_id]
            if self._shared is not None and vector[self._shared.gpu_at]:
                had[part.node_id] += part.num_workers

    def _occupy(self, when: When, part: Slice, vector: Amounts, had: int = 0) -> None:
        """Take slots of one node. Nothing is more than before, also where parts of GPUs are packed
        in another way then."""
        free = self.by_when[when]
        before, parts = free.group_of[part.node_id].amounts, self.parts(when, part.node_id)
        less, after = self.given_back(before, vector, part, parts, -1, had)
        self._parts[when, part.node_id] = after
        free.set(part.node_id, tuple(map(min, before, less)))

    def expect(self, kind: WorkerKind, slices: Sequence[Slice], held: Sequence[Slice] = ()) -> None:
        """These slots will be free. held: all that the job has."""
        self._soon.num_grown += 1
        had = kind.by_node(held)
        for part, vector in kind.vectors(slices):
            group = self._soon.group_of.get(part.node_id)
            if group is not None:
                parts = self.parts(When.SOON, part.node_id)
                there = had[part.node_id]
                amounts, after = self.given_back(group.amounts, vector, part, parts, 1, there)
                had[part.node_id] -= part.num_workers * (vector is kind.vector)
                self._parts[When.SOON, part.node_id] = after
                self._soon.set(part.node_id, amounts)

    def promise(self, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Keep these slots, of which some are not free yet."""
        for part, vector, had in self._one_by_one(kind, slices):
            self._occupy(When.SOON, part, vector, had)
            self._cap(part.node_id, self._soon)

    def most_more(self, when: When, kind: WorkerKind, held: Sequence[Slice]) -> dict[str, int]:
        """By the nodes where a group has workers on parts of GPUs: how many more have room on GPUs
        on which it has none."""
        found: dict[str, int] = {}
        if self._shared is None or not is_part_of_gpu(kind.bundle):
            return found
        for node_id, had in _by_node(held).items():
            group = self.by_when[when].group_of.get(node_id)
            if group is not None:
                parts, size = self.parts(when, node_id), kind.bundle["GPU"]
                found[node_id] = self._shared.room_to_grow(group.amounts, parts, size, had)
        return found

    def _cap(self, node_id: str, most: _Free) -> None:
        """Leave no more to NOW than `most` has on the node."""
        now, limit = self._now.group_of[node_id], most.group_of[node_id]
        self._now.set(node_id, tuple(map(min, now.amounts, limit.amounts)))


def _plus(some: Amounts, vector: Amounts, times: int) -> Amounts:
    return tuple([amount + times * each for amount, each in zip(some, vector, strict=True)])


def _by_node(slices: Sequence[Slice]) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in slices:
        found[part.node_id] += part.num_workers
    return found


def _times(vector: Amounts, total: Amounts) -> int:
    """How often a node has all of it."""
    return math.floor(
        min(((has + EPSILON) / each for each, has in zip(vector, total, strict=True) if each > 0))
    )


class Reserved:
    """The resources that are set aside on the nodes for waiting jobs: it grows."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._workers: dict[WorkerKind, int] = {}
        self._whole: set[WorkerKind] = set()
        """Those of which all is set aside that any node could have."""
        self.on = [(0.0,) * len(total) for total in stock.totals]
        """By kind of node."""
        self.version = 0

    def set_aside(self, kind: WorkerKind, num_workers: int) -> None:
        """On each node, as many slots as these workers could use there if it were empty; with those
        of others of the kind no more than it has."""
        if kind in self._whole:
            return
        if kind.unlike is not None:
            self._set_aside_unlike(kind, kind.unlike)
            return
        before = self._workers.get(kind, 0)
        self._workers[kind] = before + num_workers
        if before + num_workers >= self._stock.largest(kind):
            self._whole.add(kind)
        for at, most in enumerate(self._stock.capacity(kind)):
            if most > before:
                number = min(most, before + num_workers) - before
                self.on[at] = _plus(self.on[at], kind.vector, number)
                self.version += 1

    def _set_aside_unlike(self, kind: WorkerKind, request: Request) -> None:
        """The same for slots of all sorts."""
        sorts = [(kind.vector, request.num_alike)]
        sorts += ((kind.role_vectors[role.first_rank], role.number) for role in request.roles)
        for at, total in enumerate(self._stock.totals):
            if not kind.fits(total):
                continue
            for vector, most in sorts:
                number = min(most, _times(vector, total))
                self.on[at] = _plus(self.on[at], vector, number)
        self.version += 1
        if not self.leaves(kind):
            self._whole.add(kind)

    def leaves(self, kind: WorkerKind) -> bool:
        """Whether it leaves such a worker any room on a node that is empty."""
        return any(map(kind.fits, self._stock.totals, self.on))


class Pool:
    """The resources that some jobs may take; below zero where more is reserved."""

    def __init__(self, stock: Stock, when: When, reserved: Reserved | None = None) -> None:
        self._stock = stock
        self._when = when
        self._free = stock.by_when[when]
        self._reserved = reserved or Reserved(stock)
        self._rooms: dict[WorkerKind, _Room] = {}

    def room(self, kind: WorkerKind) -> int:
        """How many such workers fit where they may be together."""
        return self._exact(kind).most()

    def total(self, kind: WorkerKind) -> int:
        """How many such workers fit, wherever that is."""
        return self._exact(kind).total

    def closed(self, kind: WorkerKind) -> int:
        """How many more would fit on nodes with the data of silos, were those open to them."""
        groups = self._free.groups.values()
        as_open = ((self._stock.as_open(group.amounts), len(group.nodes)) for group in groups)
        return sum(kind.fits(amounts) * number for amounts, number in as_open if amounts)

    def rooms(self, kind: WorkerKind) -> dict[Place, int]:
        """How many fit, by the parts of the cluster each of which may hold a gang of them."""
        return self._exact(kind).rooms()

    def has(self, kind: WorkerKind, num_workers: int) -> bool:
        """Whether so many fit. Quick where they do not: a count of earlier is too high at most,
        unless resources were added since."""
        room = self._rooms.get(kind)
        is_bound = room is not None and room.num_grown == self._free.num_grown
        if room is not None and is_bound and room.bound < num_workers:
            return False
        room = self._exact(kind)
        return room.bound >= num_workers and room.most() >= num_workers

    def pack_most(self, kind: WorkerKind, least: int, most: int) -> tuple[Slice, ...] | None:
        """Slices of as many of `most` workers as fit, near each other (`placement`), or None if
        not even `least` do."""
        if not self.has(kind, least):
            return None
        room = self._exact(kind)
        return room.place_whole() if kind.is_whole else room.placement.pack(min(room.most(), most))

    def pack_near(
        self, kind: WorkerKind, least: int, most: int, held: Sequence[Slice]
    ) -> tuple[Slice, ...] | None:
        """The same for a group that has these slots: near them."""
        if not self.has(kind, least) or (found := self.room_near(kind, held)) < least:
            return None
        placement, near = self._exact(kind).placement, self._that_are_there(held)
        too_many = self._too_many(kind, held)
        for node_id, number in too_many.items():
            placement.change(node_id, placement.room(node_id) - number)
        slices = placement.pack(min(found, most), near)
        for node_id, number in too_many.items():
            placement.change(node_id, placement.room(node_id) + number)
        return slices

    def room_near(self, kind: WorkerKind, held: Sequence[Slice]) -> int:
        """How many fit where they may be together with workers on these slots."""
        room, near = self._exact(kind), self._that_are_there(held)
        too_many = sum(self._too_many(kind, held).values())
        if kind.required is None or not held:
            return room.most() - too_many
        return room.rooms().get(self.place_of(kind, near[0]), 0) - too_many if near else 0

    def _too_many(self, kind: WorkerKind, held: Sequence[Slice]) -> dict[str, int]:
        """By node, the workers counted there that would share a GPU with others of their group."""
        most = self._stock.most_more(self._when, kind, held)
        if not most:
            return {}
        placement = self._exact(kind).placement
        return {name: max(0, placement.room(name) - number) for name, number in most.items()}

    def pack_within(self, kind: WorkerKind, num_workers: int, place: Place) -> tuple[Slice, ...]:
        """So many of those that `rooms` says."""
        return self._exact(kind).placement.pack(num_workers, within=place) if num_workers else ()

    def at(self, node_id: str) -> tuple[Amounts, Amounts] | None:
        """The resources of a node, and those of them that are set aside; None if it is missing."""
        group = self._free.group_of.get(node_id)
        return None if group is None else (group.amounts, self._reserved.on[group.kind])

    def given_back(
        self,
        free: Sequence[float],
        vector: Sequence[float],
        part: Slice,
        parts: Parts,
        sign: int,
        had: int,
    ) -> tuple[Amounts, list[tuple[float, int]]]:
        """As `Stock.given_back`."""
        return self._stock.given_back(free, vector, part, parts, sign, had, is_again=True)

    def parts_soon(self, node_id: str) -> list[tuple[float, int]]:
        """The parts of GPUs that jobs will have on a node."""
        return self._stock.parts(When.SOON, node_id)

    def place_of(self, kind: WorkerKind, node_id: str) -> Place:
        """As `Stock.place_of`."""
        return self._stock.place_of(node_id, kind.required)

    def _that_are_there(self, slices: Sequence[Slice]) -> list[str]:
        return [part.node_id for part in slices if part.node_id in self._stock.kind_of]

    def _exact(self, kind: WorkerKind) -> _Room:
        room = self._rooms.get(kind)
        if room is None:
            room = self._rooms[kind] = _Room(kind, self._stock, self._free, self._reserved)
        room.catch_up()
        return room


class _Room:
    """How many workers of one kind have room."""

    def __init__(self, kind: WorkerKind, stock: Stock, free: _Free, reserved: Reserved) -> None:
        self._kind = kind
        self._stock = stock
        self._free = free
        self._reserved = reserved
        self._version = -1
        self._num_moves = 0
        """How many of the moves are counted here."""
        self.num_grown = 0
        self._size_of: dict[_Group, int] = {}
        """The room of each node of a group."""
        self.total = 0
        """On all nodes."""
        self.bound = 0
        """No more have room where they may be together, unless resources were added since."""
        self._is_exact = False
        """Whether so many have."""
        self._is_closed = False
        """Whether all is set aside: there will be no room."""
        self._placement: Placement | None = None
        self._num_placed = 0
        """How many of the moves the placement knows."""

    def catch_up(self) -> None:
        free, is_first = self._free, self._version < 0
        if self._is_closed and not free.exceeds_total:
            self.num_grown = free.num_grown
            return
        if self._version != self._reserved.version:
            self._count()
        elif self._num_moves == len(free.moves):
            return
        else:
            for _, left, joined in free.moves[self._num_moves :]:
                self.total += self._size(joined) - self._size(left)
        self._is_exact = self._kind.required is None and not self._kind.is_whole
        is_anew = self._is_exact or is_first or self.num_grown != free.num_grown
        self.bound = self.total if is_anew else min(self.bound, self.total)
        self._num_moves, self.num_grown = len(free.moves), free.num_grown

    def _count(self) -> None:
        self._version, self._placement = self._reserved.version, None
        self._is_closed = not self._reserved.leaves(self._kind)
        if self._is_closed and not self._free.exceeds_total:
            self._size_of, self.total = {}, 0
            self._version = -1  # counted again, should a node come to have more than its total
            return
        # Where there was no room, there is none now that more is set aside.
        self._size_of = {group: 0 for group, size in self._size_of.items() if not size}
        self.total = sum([self._size(g) * len(g.nodes) for g in self._free.groups.values()])

    def most(self) -> int:
        """How many have room where they may be together."""
        if not self._is_exact:
            self.bound, self._is_exact = max(self.rooms().values(), default=0), True
        return self.bound

    def rooms(self) -> dict[Place, int]:
        """By the parts of the cluster where they may be together."""
        required, topology = self._kind.required, self._stock.topology
        if self._kind.is_whole:
            return {topology.cluster: count(self.place_whole())}
        if required is None:
            return {topology.cluster: self.total}
        return self.placement.rooms(required.level) if topology.has(required.level) else {}

    def place_whole(self) -> tuple[Slice, ...]:
        """As `Stock.place_whole`."""
        left: dict[str, Amounts] = {}
        for group in self._free.groups.values():
            amounts = _plus(group.amounts, self._reserved.on[group.kind], -1)
            left |= dict.fromkeys(group.nodes, amounts)
        return self._stock.place_whole(self._kind, left)

    @property
    def placement(self) -> Placement:
        """The room by node."""
        moves = self._free.moves
        if self._placement is None:
            sizes = [(size, group.nodes) for group, size in self._size_of.items() if size]
            there = {name: size for size, nodes in sizes for name in nodes}
            self._placement = Placement(self._stock.topology, there)
        elif self._num_placed < len(moves):
            newest = {node_id: group for node_id, _, group in moves[self._num_placed :]}
            for node_id, group in newest.items():
                self._placement.change(node_id, self._size(group))
        self._num_placed = len(moves)
        return self._placement

    def _size(self, group: _Group) -> int:
        size = self._size_of.get(group)
        if size is None:
            aside = self._reserved.on[group.kind]
            size = self._size_of[group] = self._kind.fits(group.amounts, aside)
        return size


class Offer:
    """The slots that jobs of one right may take: now, and once others have left theirs."""

    def __init__(self, stock: Stock) -> None:
        self.reserved = Reserved(stock)
        self.now = Pool(stock, When.NOW, self.reserved)
        self.soon = Pool(stock, When.SOON, self.reserved)
