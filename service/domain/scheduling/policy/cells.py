"""Reservations, and the nodes in them, as sets of bits, because the jobs of a long queue have many
different fences (`slots.Fence`)."""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate

from service.domain.scheduling.rules.reservations import Claimant, Reservation


def bits(number: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, the lowest first."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


class Cells:
    """The sets of nodes that are in the same reservations. Reservations and cells are numbered, and
    integers stand for sets of them: bit N is set if number N is in the set. Cell 0 contains the
    nodes in no reservation."""

    def __init__(self, node_ids: Iterable[str], nodes_of: Sequence[Collection[str]]) -> None:
        """`nodes_of` contains the nodes of each reservation."""
        windows_of_node = dict.fromkeys(node_ids, 0)
        for window, names in enumerate(nodes_of):
            for name in names:
                windows_of_node[name] |= 1 << window
        numbers: dict[int, int] = {0: 0}
        self.nodes: list[list[str]] = [[]]
        """The nodes of each cell."""
        self.of_node: dict[str, int] = {}
        for name, windows in windows_of_node.items():
            cell = self.of_node[name] = numbers.setdefault(windows, len(numbers))
            if cell == len(self.nodes):
                self.nodes.append([])
            self.nodes[cell].append(name)
        self._windows_of = list(numbers)
        """The reservations that include each cell."""
        self.of_window = [union(1 << self.of_node[name] for name in names) for names in nodes_of]
        """The cells of each reservation."""
        self._of: dict[int, int] = {}
        self._windows_in: dict[int, int] = {}

    @property
    def all(self) -> int:
        return (1 << len(self.nodes)) - 1

    def nodes_in(self, cells: int) -> frozenset[str]:
        return frozenset(name for cell in bits(cells) for name in self.nodes[cell])

    def of(self, windows: int) -> int:
        """Return the cells of these reservations."""
        found = self._of.get(windows)
        if found is None:
            found = self._of[windows] = union(self.of_window[window] for window in bits(windows))
        return found

    def reserved(self, begun: Collection[int], but: int) -> int:
        """Return the cells of the reservations in the sets `begun`, except the reservations in
        `but`."""
        found, windows = union(map(self.of, begun)), union(begun)
        others = windows & ~but
        for cell in bits(self.of(windows & but)):
            if not self._windows_of[cell] & others:
                found &= ~(1 << cell)
        return found

    def windows_in(self, cells: int) -> int:
        """Return the reservations that include some of these cells."""
        found = self._windows_in.get(cells)
        if found is None:
            found = self._windows_in[cells] = union(self._windows_of[cell] for cell in bits(cells))
        return found


class ByTime:
    """Reservations, sorted by a time, such as the time at which they begin."""

    def __init__(self, of_each: Iterable[tuple[float, int]]) -> None:
        """`of_each` contains pairs (seconds until the time, number of the reservation)."""
        pairs = sorted(of_each)
        self._in_s = [in_s for in_s, _ in pairs]
        self._first = [*accumulate((1 << at for _, at in pairs), operator.or_, initial=0)]
        """For each N, the first N reservations."""

    def before(self, in_s: float) -> int:
        """Return the reservations whose time is in less than `in_s` seconds."""
        return self._first[bisect_left(self._in_s, in_s)]

    def until(self, in_s: float) -> int:
        """Return the reservations whose time is in at most `in_s` seconds."""
        return self._first[bisect_right(self._in_s, in_s)]


class Claims:
    """Which reservations each job can use, as sets of bits."""

    def __init__(self, windows: Sequence[Reservation]) -> None:
        self._users: defaultdict[str, int] = defaultdict(int)
        self._queues: defaultdict[str, int] = defaultdict(int)
        self._projects: defaultdict[str, int] = defaultdict(int)
        self._named: defaultdict[str | None, int] = defaultdict(int)
        """The reservations that jobs with each name can use; for None, the reservations that accept
        jobs without a name."""
        for at, window in enumerate(windows):
            for of_each, names in (
                (self._users, window.users),
                (self._queues, window.queues),
                (self._projects, window.projects),
            ):
                for name in names:
                    of_each[name] |= 1 << at
            self._named[window.name] |= 1 << at
            if window.accepts_unnamed:
                self._named[None] |= 1 << at

    def admitting(self, job: Claimant) -> int:
        """Return the reservations that admit the job."""
        named = self._named.get(job.reservation, 0)
        if not named:
            return 0
        return named & (
            self._users.get(job.owner, 0)
            | self._queues.get(job.queue, 0)
            | self._projects.get(job.project, 0)
        )
