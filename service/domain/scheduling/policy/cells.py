"""Reservations, and the nodes in them, as sets of bits, because the jobs of a long queue have many
different fences (`slots.Fence`)."""

from __future__ import annotations

import functools
import operator
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

    def __init__(
        self, node_ids: Iterable[str], nodes_of: Sequence[Collection[str]], num_soft: int
    ) -> None:
        """`nodes_of` contains the nodes of each reservation, of which the first `num_soft` are
        soft."""
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
        self._windows_in: dict[int, int] = {}
        soft, hard = self.of_window[:num_soft], self.of_window[num_soft:]
        self._num_soft = num_soft
        self._of_first_soft = [*accumulate(soft, operator.or_, initial=0)]
        self._of_first_hard = [*accumulate(hard, operator.or_, initial=0)]

    @property
    def all(self) -> int:
        return (1 << len(self.nodes)) - 1

    def nodes_in(self, cells: int) -> frozenset[str]:
        return frozenset(name for cell in bits(cells) for name in self.nodes[cell])

    def first(self, soft: int, hard: int) -> int:
        """Return the first `soft` soft reservations and the first `hard` other reservations."""
        return (1 << soft) - 1 | ((1 << hard) - 1) << self._num_soft

    def of_first(self, soft: int, hard: int, but: int) -> int:
        """Return the cells of the reservations in `first`, except the reservations in `but`."""
        found = self._of_first_soft[soft] | self._of_first_hard[hard]
        first = self.first(soft, hard)
        others = first & ~but
        for cell in bits(union(self.of_window[window] for window in bits(first & but))):
            if not self._windows_of[cell] & others:
                found &= ~(1 << cell)
        return found

    def windows_in(self, cells: int) -> int:
        """Return the reservations that include some of these cells."""
        found = self._windows_in.get(cells)
        if found is None:
            found = self._windows_in[cells] = union(self._windows_of[cell] for cell in bits(cells))
        return found


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
