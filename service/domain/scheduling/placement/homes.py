"""Gangs whose workers have homes: the nodes on which their own data lie, by the nodes' labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ray_workers.shared.contracts import Slice

Homes = tuple[tuple[str, ...], ...]
"""Of each worker but the first, which may be anywhere: the labels of its node, as resources."""
HasLabels = Callable[[str, tuple[str, ...]], bool]
"""(node, labels): whether the node has all of them."""


def at_home(
    homes: Homes,
    rooms: Mapping[str, int],
    has_labels: HasLabels,
    is_open: Callable[[str], bool],
) -> tuple[Slice, ...] | int:
    """A slice for each worker, in their order; or the place in `homes` of one that has no room on
    any node of its own, len(homes) for the first worker.

    rooms: by node, the workers that fit there. is_open: whether a node takes ranks that are no
    silo, as the first worker is. It goes to a node that is no worker's home, if one has room.
    """
    nodes = sorted(node for node, room in rooms.items() if room > 0)
    may_take = [[node for node in nodes if has_labels(node, labels)] for labels in homes]
    lived_in = {node for some in may_take for node in some}
    of_first = sorted(filter(is_open, nodes), key=lambda node: (node in lived_in, node))
    may_take.append(of_first)
    taken: dict[str, list[int]] = {node: [] for node in nodes}
    for worker in range(len(homes) + 1):
        if not _place(worker, may_take, rooms, taken, set()):
            return worker
    node_of = {worker: node for node, workers in taken.items() for worker in workers}
    first, *own = (node_of[worker] for worker in (len(homes), *range(len(homes))))
    return tuple(Slice(node, 1) for node in (first, *own))


def _place(
    worker: int,
    may_take: Sequence[Sequence[str]],
    rooms: Mapping[str, int],
    taken: dict[str, list[int]],
    tried: set[str],
) -> bool:
    """Find a node for a worker, and others for those that it displaces (Kuhn's matching)."""
    for node in may_take[worker]:
        if node in tried:
            continue
        tried.add(node)
        if len(taken[node]) < rooms[node]:
            taken[node].append(worker)
            return True
        for at, other in enumerate(taken[node]):
            if _place(other, may_take, rooms, taken, tried):
                taken[node][at] = worker
                return True
    return False
