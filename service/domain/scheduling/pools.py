"""Free resources of nodes, and the room that they have for workers of each kind.

A plan asks for room once a job, and most jobs are of few kinds. So a node's room for a kind of
worker is counted once, and again only where its resources have changed.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Mapping, Sequence

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.slots import Kind, Node, Request, add, fits


class Pool:
    """The resources of each node that some jobs may take; below zero where more is reserved."""

    def __init__(self, free: Iterable[tuple[str, Mapping[str, float]]]) -> None:
        self._free = {node_id: dict(there) for node_id, there in free}
        self._room: dict[Kind, _Room] = {}
        self._changed: list[str] = []

    def room(self, request: Request) -> int:
        """How many workers of the request's kind fit."""
        return self._of_kind(request).total

    def pack(self, request: Request, num_workers: int) -> tuple[Slice, ...] | None:
        """Slices of so many workers on as few nodes as possible, or None if they do not fit.

        The fullest-fitting node first; what remains at the end goes to the tightest node that takes
        all of it, so that large holes stay whole.
        """
        return self._of_kind(request).pack(num_workers)

    def pack_most(self, request: Request, most: int) -> tuple[Slice, ...] | None:
        """As many of `most` workers of a gang as fit, or None if its least number does not."""
        room = self._of_kind(request)
        fitting = min(room.total, most)
        return room.pack(fitting) if fitting >= request.least else None

    def add(self, node_id: str, bundle: Mapping[str, float], times: int) -> None:
        """Return so many bundles, or take them where `times` is negative."""
        if node_id in self._free:
            add(self._free[node_id], bundle, times)
            self._changed.append(node_id)

    def lower(self, node_id: str, most: Mapping[str, float]) -> None:
        """Leave no more than `most` of each resource of a node."""
        free = self._free[node_id]
        for name in free:
            free[name] = min(free[name], most.get(name, 0.0))
        self._changed.append(node_id)

    def at(self, node_id: str) -> Mapping[str, float]:
        return self._free.get(node_id, {})

    def _of_kind(self, request: Request) -> _Room:
        room = self._room.get(request.kind)
        if room is None:
            room = _Room(request.bundle, self._free, len(self._changed))
            self._room[request.kind] = room
        room.catch_up(self._free, self._changed)
        return room


class _Room:
    """How many workers of one kind each node has room for."""

    def __init__(
        self, bundle: Mapping[str, float], free: Mapping[str, Mapping[str, float]], changes: int
    ) -> None:
        self._bundle = bundle
        self._changes = changes
        """How many of the pool's changes are counted here."""
        self._of: dict[str, int] = {}
        self._nodes: dict[int, list[str]] = {}
        """Heaps of nodes by their room, with some that have another by now."""
        self._sizes: list[int] = []
        """Keys of `_nodes`, the least first."""
        self.total = 0
        for node_id, there in free.items():
            self._set(node_id, fits(bundle, there))

    def catch_up(self, free: Mapping[str, Mapping[str, float]], changed: Sequence[str]) -> None:
        for node_id in set(changed[self._changes :]):
            self._set(node_id, fits(self._bundle, free[node_id]))
        self._changes = len(changed)

    def pack(self, num_workers: int) -> tuple[Slice, ...] | None:
        if self.total < num_workers:
            return None
        chosen: dict[str, int] = {}
        while num_workers:
            size, node_id = self._best(num_workers)
            heapq.heappop(self._nodes[size])
            if node_id not in chosen:
                chosen[node_id] = min(size, num_workers)
                num_workers -= chosen[node_id]
        for node_id in chosen:
            heapq.heappush(self._nodes[self._of[node_id]], node_id)
        return tuple(Slice(node_id, number) for node_id, number in chosen.items())

    def _best(self, num_workers: int) -> tuple[int, str]:
        """The node that has the least room of those that take all, else the most of any."""
        while True:
            at = min(bisect.bisect_left(self._sizes, num_workers), len(self._sizes) - 1)
            size = self._sizes[at]
            nodes = self._nodes[size]
            while nodes and self._of[nodes[0]] != size:
                heapq.heappop(nodes)
            if nodes:
                return size, nodes[0]
            del self._sizes[at]

    def _set(self, node_id: str, size: int) -> None:
        before = self._of.get(node_id, 0)
        self._of[node_id] = size
        self.total += size - before
        if size and size != before:
            heapq.heappush(self._nodes.setdefault(size, []), node_id)
            at = bisect.bisect_left(self._sizes, size)
            if self._sizes[at : at + 1] != [size]:
                self._sizes.insert(at, size)


class Offer:
    """The slots that jobs of one right may take: now, and once others have left theirs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.now = Pool((node.id, node.available_to_us) for node in nodes)
        self.soon = Pool((node.id, node.available_to_us) for node in nodes)
        self._nodes = nodes
        self._aside: dict[Kind, int] = {}
        """Workers of each kind for which slots were set aside."""
        self._capacity: dict[Kind, list[tuple[str, int]]] = {}
        """Workers of each kind that the empty nodes have room for, the least first."""

    def take(self, bundle: Mapping[str, float], slices: Sequence[Slice]) -> None:
        for part in slices:
            self.now.add(part.node_id, bundle, -part.num_workers)
            self.soon.add(part.node_id, bundle, -part.num_workers)

    def expect(self, bundle: Mapping[str, float], slices: Sequence[Slice]) -> None:
        """These slots will be free."""
        for part in slices:
            self.soon.add(part.node_id, bundle, part.num_workers)

    def promise(self, bundle: Mapping[str, float], slices: Sequence[Slice]) -> None:
        """Keep these slots, of which some are not free yet."""
        for part in slices:
            self.soon.add(part.node_id, bundle, -part.num_workers)
            self.now.lower(part.node_id, self.soon.at(part.node_id))

    def set_aside(self, request: Request, num_workers: int) -> None:
        """On each node, as many slots as these workers could use there if it were empty; with
        those of others of the kind no more than it has."""
        kind, bundle = request.kind, request.bundle
        if kind not in self._capacity:
            capacity = [(node.id, fits(bundle, node.total)) for node in self._nodes]
            self._capacity[kind] = sorted(capacity, key=lambda entry: entry[1])
        before = self._aside.get(kind, 0)
        self._aside[kind] = before + num_workers
        rest = bisect.bisect_right(self._capacity[kind], before, key=lambda entry: entry[1])
        for node_id, most in self._capacity[kind][rest:]:
            number = min(most, before + num_workers) - before
            self.now.add(node_id, bundle, -number)
            self.soon.add(node_id, bundle, -number)
