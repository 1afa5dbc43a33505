"""Free resources of nodes, and the room that they have for workers of each kind.

Nodes of which everything is equal are one group, and room is counted by group: most of a large
cluster's nodes are of few kinds, and either empty or full. The amount that is set aside for waiting
jobs is the same on all nodes that are equal when they are empty: one number for all of these.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Container, Iterator, Sequence
from enum import IntEnum

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.gangs import Gangs, WorkerKind
from service.domain.scheduling.slots import Node

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


State = tuple[Amounts, Amounts, Amounts]
"""Of a node, by `When`; below zero where more is promised."""


class _Group:
    """Nodes with the same resources."""

    __slots__ = ("kind", "nodes", "number", "state")

    def __init__(self, kind: int, state: State) -> None:
        self.kind = kind
        """Of the nodes, by what they have when they are empty."""
        self.state = state
        self.nodes: list[str] = []
        """A heap, with some that have left."""
        self.number = 0


class Stock:
    """The resources of all nodes while one plan is made."""

    def __init__(self, nodes: Sequence[Node], gangs: Gangs) -> None:
        """gangs: with all whose jobs will ask."""
        self.kind_of: dict[str, int] = {}
        """By node."""
        self.totals: list[Amounts] = []
        """By kind of node."""
        self.counts: list[int] = []
        self.moves: list[tuple[_Group, _Group]] = []
        """Nodes that have changed, by the groups that they left and joined."""
        self.num_grown = 0
        """How often resources were added."""
        self._group_of: dict[str, _Group] = {}
        self._groups: dict[tuple[int, State], _Group] = {}
        self._capacity: dict[WorkerKind, tuple[int, ...]] = {}
        self._largest: dict[WorkerKind, int] = {}
        self._whole: dict[WorkerKind, int] = {}
        kinds: dict[Amounts, int] = {}
        for node in nodes:
            total, free = gangs.vector(node.total), gangs.vector(node.available_to_us)
            kind = kinds.setdefault(total, len(kinds))
            if kind == len(self.totals):
                self.totals.append(total)
                self.counts.append(0)
            self.counts[kind] += 1
            self.kind_of[node.id] = kind
            self._join(node.id, kind, (free, free, free))

    @property
    def groups(self) -> Iterator[_Group]:
        return iter(self._groups.values())

    def is_in(self, node_id: str, group: _Group) -> bool:
        return self._group_of[node_id] is group

    def state_of(self, node_id: str) -> _Group | None:
        return self._group_of.get(node_id)

    def capacity(self, kind: WorkerKind) -> tuple[int, ...]:
        """How many such workers an empty node has room for, by kind of node."""
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
        """How many such workers the empty cluster has room for."""
        found = self._whole.get(kind)
        if found is None:
            of_nodes = zip(self.capacity(kind), self.counts, strict=True)
            found = self._whole[kind] = sum([each * number for each, number in of_nodes])
        return found

    def take(self, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """A job holds these slots from now on."""
        for part in slices:
            group = self._group_of.get(part.node_id)
            if group is not None:
                free, now, soon = group.state
                taken = _plus(free, kind.vector, -part.num_workers)
                now_left = taken if now == free else _plus(now, kind.vector, -part.num_workers)
                soon_left = taken if soon == free else _plus(soon, kind.vector, -part.num_workers)
                self._move(part.node_id, group, (taken, now_left, soon_left))

    def expect(self, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """These slots will be free."""
        self.num_grown += 1
        for part in slices:
            group = self._group_of.get(part.node_id)
            if group is not None:
                free, now, soon = group.state
                more = _plus(soon, kind.vector, part.num_workers)
                self._move(part.node_id, group, (free, now, more))

    def promise(self, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Keep these slots, of which some are not free yet."""
        for part in slices:
            group = self._group_of[part.node_id]
            free, now, soon = group.state
            less = _plus(soon, kind.vector, -part.num_workers)
            self._move(part.node_id, group, (free, tuple(map(min, now, less)), less))

    def _move(self, node_id: str, group: _Group, state: State) -> None:
        group.number -= 1
        if not group.number:
            del self._groups[group.kind, group.state]
        self.moves.append((group, self._join(node_id, group.kind, state)))

    def _join(self, node_id: str, kind: int, state: State) -> _Group:
        group = self._groups.get((kind, state))
        if group is None:
            group = self._groups[kind, state] = _Group(kind, state)
        group.number += 1
        heapq.heappush(group.nodes, node_id)
        self._group_of[node_id] = group
        return group


def _plus(some: Amounts, vector: Amounts, times: int) -> Amounts:
    return tuple([amount + times * each for amount, each in zip(some, vector, strict=True)])


class Reserved:
    """The resources that are set aside on the nodes for waiting jobs."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._workers: dict[WorkerKind, int] = {}
        self.on = [(0.0,) * len(total) for total in stock.totals]
        """By kind of node."""
        self.version = 0

    def set_aside(self, kind: WorkerKind, num_workers: int) -> None:
        """On each node, as many slots as these workers could use there if it were empty; with those
        of others of the kind no more than it has."""
        before = self._workers.get(kind, 0)
        self._workers[kind] = before + num_workers
        if before >= self._stock.largest(kind):
            return
        for at, most in enumerate(self._stock.capacity(kind)):
            if most > before:
                number = min(most, before + num_workers) - before
                self.on[at] = _plus(self.on[at], kind.vector, number)
                self.version += 1


class Pool:
    """The resources that some jobs may take; below zero where more is reserved."""

    def __init__(self, stock: Stock, when: When, reserved: Reserved | None = None) -> None:
        self._stock = stock
        self._when = when
        self._reserved = reserved or Reserved(stock)
        self._rooms: dict[WorkerKind, _Room] = {}

    def room(self, kind: WorkerKind) -> int:
        """How many such workers fit."""
        return self._exact(kind).total

    def has(self, kind: WorkerKind, num_workers: int) -> bool:
        """Whether so many fit. Quick where they do not: a count of earlier is too high at most,
        unless resources were added since."""
        room = self._rooms.get(kind)
        is_bound = room is not None and room.num_grown == self._stock.num_grown
        if room is not None and is_bound and room.total < num_workers:
            return False
        return self._exact(kind).total >= num_workers

    def pack(self, kind: WorkerKind, num_workers: int) -> tuple[Slice, ...] | None:
        """Slices of so many workers on as few nodes as possible, or None if they do not fit.

        The fullest-fitting node first; what remains at the end goes to the tightest node that takes
        all of it, so that large holes stay whole.
        """
        return self._exact(kind).pack(num_workers) if self.has(kind, num_workers) else None

    def pack_most(self, kind: WorkerKind, least: int, most: int) -> tuple[Slice, ...] | None:
        """As many of `most` workers as fit, or None if not even `least` do."""
        if not self.has(kind, least):
            return None
        room = self._exact(kind)
        return room.pack(min(room.total, most))

    def at(self, node_id: str) -> list[float] | None:
        """The resources of a node; None of one that is not there."""
        group = self._stock.state_of(node_id)
        if group is None:
            return None
        aside = self._reserved.on[group.kind]
        return [a - b for a, b in zip(group.state[self._when], aside, strict=True)]

    def _exact(self, kind: WorkerKind) -> _Room:
        room = self._rooms.get(kind)
        if room is None:
            room = self._rooms[kind] = _Room(kind, self._stock, self._when, self._reserved)
        room.catch_up()
        return room


class _Room:
    """How many workers of one kind each group of nodes has room for."""

    def __init__(self, kind: WorkerKind, stock: Stock, when: When, reserved: Reserved) -> None:
        self._kind = kind
        self._stock = stock
        self._when = when
        self._reserved = reserved
        self._version = -1
        self._num_moves = 0
        """How many of the stock's moves are counted here."""
        self.num_grown = 0
        self._size_of: dict[_Group, int] = {}
        self._groups: dict[int, list[_Group]] = {}
        """By the room of each of their nodes, with some that are empty by now."""
        self._sizes: list[int] = []
        """Keys of `_groups`, the least first."""
        self.total = 0

    def catch_up(self) -> None:
        stock = self._stock
        if self._version != self._reserved.version:
            self._version = self._reserved.version
            self._size_of, self._groups, self._sizes = {}, {}, []
            self.total = sum([self._size(group) * group.number for group in stock.groups])
        elif self._num_moves == len(stock.moves):
            return
        else:
            for left, joined in stock.moves[self._num_moves :]:
                self.total += self._size(joined) - self._size(left)
        self._num_moves, self.num_grown = len(stock.moves), stock.num_grown

    def pack(self, num_workers: int) -> tuple[Slice, ...]:
        """As many as there is room for."""
        chosen: dict[str, int] = {}
        while num_workers:
            size, group = self._best(num_workers, chosen)
            node_id = heapq.heappop(group.nodes)
            chosen[node_id] = min(size, num_workers)
            num_workers -= chosen[node_id]
        for node_id in chosen:
            group_of = self._stock.state_of(node_id)
            assert group_of is not None
            heapq.heappush(group_of.nodes, node_id)
        return tuple([Slice(node_id, number) for node_id, number in chosen.items()])

    def _best(self, num_workers: int, chosen: Container[str]) -> tuple[int, _Group]:
        """The group of the first node, by its id, of those that have the least room and take all,
        else the most room of any."""
        at = bisect.bisect_left(self._sizes, num_workers)
        for size in (*self._sizes[at:], *reversed(self._sizes[:at])):
            groups = self._groups[size] = [g for g in self._groups[size] if g.number]
            firsts = [(node, g) for g in groups if (node := self._first(g, chosen)) is not None]
            if firsts:
                return size, min(firsts, key=lambda first: first[0])[1]
            if not groups:
                del self._groups[size]
                self._sizes.remove(size)
        raise AssertionError("the room is counted, so it is there")

    def _first(self, group: _Group, chosen: Container[str]) -> str | None:
        nodes = group.nodes
        while nodes and (nodes[0] in chosen or not self._stock.is_in(nodes[0], group)):
            heapq.heappop(nodes)
        return nodes[0] if nodes else None

    def _size(self, group: _Group) -> int:
        size = self._size_of.get(group)
        if size is None:
            aside = self._reserved.on[group.kind]
            free = [a - b for a, b in zip(group.state[self._when], aside, strict=True)]
            size = self._size_of[group] = self._kind.fits(free)
            if size:
                if size not in self._groups:
                    bisect.insort(self._sizes, size)
                self._groups.setdefault(size, []).append(group)
        return size


class Offer:
    """The slots that jobs of one right may take: now, and once others have left theirs."""

    def __init__(self, stock: Stock) -> None:
        self.reserved = Reserved(stock)
        self.now = Pool(stock, When.NOW, self.reserved)
        self.soon = Pool(stock, When.SOON, self.reserved)
