"""Gossip graphs: the weights with which a rank mixes other ranks' copies in a step.

The weights of a step form a matrix M: the new copy of rank i is the sum over j of M[i, j] times the
copy of rank j. The rows and the columns of M sum to 1, so the mean of all copies doesn't change,
and equal copies stay equal. With directed graphs (`sgp`), only the columns sum to 1: a rank divides
its copy among its receivers, regardless of what the receivers get from other ranks. A rank's push
weight is a number that is divided in the same way as its copy, so the push weight equals the sum of
the shares of copies that the rank holds.

All ranks compute the same graph from (seed, step), so receivers know their senders.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from dray.spec import Gossip
from dray.spec.training.sync import distances
from ray_workers.training.data.sampler import derive_seed

Row = Mapping[int, float]
"""The weights with which a rank mixes copies, including its own copy, keyed by rank."""


class Graph(ABC):
    """The edges between `num_ranks` ranks, which can change from step to step."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    @abstractmethod
    def row(self, rank: int, step: int) -> Row:
        """Return the weights with which a rank mixes copies in a step. Steps are counted from 1."""

    @abstractmethod
    def receivers(self, rank: int, step: int) -> list[int]:
        """Return the other ranks whose rows include this rank, in ascending order."""


class Static(Graph):
    """A graph with the same edges in every step; the row of each rank specifies the edges."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(len(rows))
        self._rows = rows
        self._receivers: list[list[int]] = [[] for _ in rows]
        for rank, row in enumerate(rows):
            for other in row:
                if other != rank:
                    self._receivers[other].append(rank)

    def row(self, rank: int, step: int) -> Row:
        return self._rows[rank]

    def receivers(self, rank: int, step: int) -> list[int]:
        return self._receivers[rank]


class Complete(Graph):
    """A graph with an edge between every two ranks."""

    def row(self, rank: int, step: int) -> Row:
        return dict.fromkeys(range(self.num_ranks), 1 / self.num_ranks)

    def receivers(self, rank: int, step: int) -> list[int]:
        return [other for other in range(self.num_ranks) if other != rank]


class OnePeerExponential(Graph):
    """In consecutive steps, a rank mixes with the ranks at distances 1, 2, 4 and so on
    (arXiv:2110.13363). If the number of ranks is a power of two, one pass through the distances
    computes the exact average."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._distances = [1 << power for power in range((num_ranks - 1).bit_length())]

    def row(self, rank: int, step: int) -> Row:
        return {rank: 0.5, (rank - self._distance(step)) % self.num_ranks: 0.5}

    def receivers(self, rank: int, step: int) -> list[int]:
        return [(rank + self._distance(step)) % self.num_ranks]

    def _distance(self, step: int) -> int:
        return self._distances[(step - 1) % len(self._distances)]


class RandomPairs(Graph):
    """Each step divides the ranks into random pairs, which average their copies. If the number of
    ranks is odd, one rank has no partner."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        super().__init__(num_ranks)
        self._seed = seed
        self._drawn: tuple[int, list[int]] = (0, [])
        """The step of the latest draw, and the partner of each rank in this step."""

    def row(self, rank: int, step: int) -> Row:
        other = self._other(rank, step)
        return {rank: 1.0} if other == rank else {rank: 0.5, other: 0.5}

    def receivers(self, rank: int, step: int) -> list[int]:
        other = self._other(rank, step)
        return [] if other == rank else [other]

    def _other(self, rank: int, step: int) -> int:
        if self._drawn[0] != step:
            order = _drawn_order(self.num_ranks, self._seed, step)
            others = list(range(self.num_ranks))
            for one, other in zip(order[::2], order[1::2], strict=False):
                others[one], others[other] = other, one
            self._drawn = (step, others)
        return self._drawn[1][rank]


class RandomCircle(Graph):
    """Each step arranges all ranks in a random circle, in which each rank sends half of its copy to
    the next rank."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        super().__init__(num_ranks)
        self._seed = seed
        self._drawn: tuple[int, dict[int, int], dict[int, int]] = (0, {}, {})
        """(step, the predecessor of each rank, the successor of each rank)."""

    def row(self, rank: int, step: int) -> Row:
        before, _ = self._neighbours(rank, step)
        return {rank: 0.5, before: 0.5}

    def receivers(self, rank: int, step: int) -> list[int]:
        _, after = self._neighbours(rank, step)
        return [after]

    def _neighbours(self, rank: int, step: int) -> tuple[int, int]:
        if self._drawn[0] != step:
            order = _drawn_order(self.num_ranks, self._seed, step)
            following = [*order[1:], order[0]]
            before = dict(zip(following, order, strict=True))
            self._drawn = (step, before, dict(zip(order, following, strict=True)))
        return self._drawn[1][rank], self._drawn[2][rank]


def _drawn_order(num_ranks: int, seed: int, step: int) -> list[int]:
    order = list(range(num_ranks))
    random.Random(derive_seed("gossip", seed, step)).shuffle(order)
    return order


def graph_of(options: Gossip, num_ranks: int, seed: int) -> Graph:
    """Return the graph that the document specifies for `d_psgd` or `sgp`."""
    pushes = options.mode == "sgp"
    match options.graph:
        case "complete":
            return Complete(num_ranks)
        case "exponential":
            return OnePeerExponential(num_ranks)
        case "random":
            return RandomCircle(num_ranks, seed) if pushes else RandomPairs(num_ranks, seed)
        case "ring":
            edges = {(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)}
        case "custom":
            assert options.edges is not None
            edges = {(one, other) for one, other in options.edges}
    return Static(pushed_rows(edges, num_ranks) if pushes else shared_rows(edges, num_ranks))


def without_missing(options: Gossip, worker_indices: Sequence[int], num_positions: int) -> Gossip:
    """Return the document's graph without the missing ranks.

    worker_indices: the index of each rank's worker, which stays the same for the whole attempt. The
    first workers' positions in the graph are their indices; later workers get free positions.
    num_positions: the number of ranks in the document.

    Positions only matter for custom graphs. The neighbours of a missing rank are connected in a
    circle, which replaces every path through the missing rank.
    """
    if options.edges is None or list(worker_indices) == list(range(num_positions)):
        return options
    free = iter(sorted(set(range(num_positions)).difference(worker_indices)))
    positions = [
        worker_index if worker_index < num_positions else next(free)
        for worker_index in worker_indices
    ]
    edges = {(one, other) for one, other in options.edges}
    for gone in set(range(num_positions)).difference(positions):
        near = sorted({position for edge in edges if gone in edge for position in edge} - {gone})
        edges = {edge for edge in edges if gone not in edge}
        edges |= set(zip(near, [*near[1:], *near[:1]], strict=True))
    rank_at = {position: rank for rank, position in enumerate(positions)}
    left = sorted([rank_at[one], rank_at[other]] for one, other in edges if one != other)
    return options.model_copy(update={"edges": left})


def sides_of(options: Gossip, rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the neighbours of a rank for `ad_psgd`: (the ranks to which it sends requests, the
    ranks that send requests to it). One of the two lists is empty, because the graph has two sides,
    and only ranks on the side of rank 0 send requests. Edges between two ranks on the same side are
    left out; they can occur if ranks are missing."""
    side = {other: other % 2 for other in range(num_ranks)}
    match options.graph:
        case "complete" | "random":
            near = set(range(num_ranks))
        case "custom":
            assert options.edges is not None
            both = [*options.edges, *((other, one) for one, other in options.edges)]
            near = {other for one, other in both if one == rank}
            side = {other: away % 2 for other, away in distances(both, num_ranks).items()}
        case _:
            near = {(rank - 1) % num_ranks, (rank + 1) % num_ranks}
    others = sorted(other for other in near if side[other] != side[rank])
    return (others, []) if side[rank] == 0 else ([], others)


def pushed_rows(edges: Iterable[tuple[int, int]], num_ranks: int) -> list[Row]:
    """Return weights for directed edges: a rank divides its copy into equal parts, one for each
    receiver and one for itself."""
    targets: list[set[int]] = [set() for _ in range(num_ranks)]
    for one, other in edges:
        targets[one].add(other)
    parts = [1 / (1 + len(of)) for of in targets]
    rows: list[dict[int, float]] = [{rank: parts[rank]} for rank in range(num_ranks)]
    for rank in range(num_ranks):
        for target in targets[rank]:
            rows[target][rank] = parts[rank]
    return list(rows)


def shared_rows(edges: Iterable[tuple[int, int]], num_ranks: int) -> list[Row]:
    """Return weights for undirected edges: 1 / (1 + the larger number of neighbours of the two
    ranks) (Metropolis weights, Xiao and Boyd 2004). With these weights, rows and columns sum to
    1."""
    near: list[set[int]] = [set() for _ in range(num_ranks)]
    for one, other in edges:
        near[one].add(other)
        near[other].add(one)
    rows: list[Row] = []
    for rank, others in enumerate(near):
        weights = {at: 1 / (1 + max(len(others), len(near[at]))) for at in sorted(others)}
        rows.append({rank: 1.0 - sum(weights.values()), **weights})
    return rows


def all_have_heard(graph: Graph, rank: int, step: int) -> int:
    """Return the step after which information from `rank` has reached all ranks. The information is
    first sent in `step`, and every rank forwards it with its copies."""
    heard = {rank}
    while True:
        heard |= {
            other
            for other in range(graph.num_ranks)
            if other not in heard and heard & graph.row(other, step).keys()
        }
        if len(heard) == graph.num_ranks:
            return step
        step += 1
