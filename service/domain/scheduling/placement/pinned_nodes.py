"""Placement of gangs with pinned nodes: each worker runs on a node that stores its data, identified
by labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ray_workers.shared.slices import Slice

PinnedNodes = tuple[tuple[str, ...], ...]
"""The labels of each worker's node, as resources. The first worker is omitted, because it is not
pinned."""
HasLabels = Callable[[str, tuple[str, ...]], bool]
"""Callback that returns whether a node has all of the given labels."""


def place_pinned(
    homes: PinnedNodes,
    capacities: Mapping[str, int],
    has_labels: HasLabels,
    is_open: Callable[[str], bool],
) -> tuple[Slice, ...] | int:
    """Return a slice for each worker, in the order of the workers. If a worker does not fit on its
    pinned nodes, return its index in `homes` instead; the first worker has the index len(homes).

    `capacities` is the number of workers that fit on each node. `is_open` returns whether a node
    accepts ranks other than silos. The first worker needs such a node, and prefers a node to which
    no other worker is pinned.
    """
    nodes = sorted(node for node, capacity in capacities.items() if capacity > 0)
    may_take = [[node for node in nodes if has_labels(node, labels)] for labels in homes]
    pinned_to = {node for some in may_take for node in some}
    of_first = sorted(filter(is_open, nodes), key=lambda node: (node in pinned_to, node))
    may_take.append(of_first)
    taken: dict[str, list[int]] = {node: [] for node in nodes}
    for worker in range(len(homes) + 1):
        if not _place(worker, may_take, capacities, taken, set()):
            return worker
    node_of = {worker: node for node, workers in taken.items() for worker in workers}
    first, *own = (node_of[worker] for worker in (len(homes), *range(len(homes))))
    return tuple(Slice(node, 1) for node in (first, *own))


def _place(
    worker: int,
    may_take: Sequence[Sequence[str]],
    capacities: Mapping[str, int],
    taken: dict[str, list[int]],
    tried: set[str],
) -> bool:
    """Find a node for a worker, moving other workers to other nodes if necessary (Kuhn's matching
    algorithm). Returns whether a node was found."""
    for node in may_take[worker]:
        if node in tried:
            continue
        tried.add(node)
        if len(taken[node]) < capacities[node]:
            taken[node].append(worker)
            return True
        for at, other in enumerate(taken[node]):
            if _place(other, may_take, capacities, taken, tried):
                taken[node][at] = worker
                return True
    return False
