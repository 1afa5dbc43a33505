"""Assigns ranks to the workers of a group that divides a model, so that the workers keep their
parts. The module is pure, and imports neither Ray nor torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.mesh_shape import MeshPosition, MeshShape


@dataclass(frozen=True)
class Seated:
    """A worker that can get a rank."""

    index: int
    position: MeshPosition | None
    """The position for which the worker's process may have a state; None if it has no state."""
    since: int = 0
    """The announced round in which the process got its rank."""


def arranged(
    workers: Sequence[Seated], shape: MeshShape
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the workers that form complete replicas, in rank order, and of the
    workers that are left over.

    A worker keeps its part, and its replica if possible. If more workers have a part than there are
    replicas, the workers that got their ranks first keep it, because a process that got its rank
    later might not have received its state yet. Among workers that got their ranks in the same
    round, the workers of complete replicas keep the part, because the other workers might have been
    interrupted in the middle of an update. The remaining workers get the remaining positions, in
    the given order.
    """
    num_replicas = len(workers) // shape.num_parts
    world_size = num_replicas * shape.num_parts
    num_in = Counter(one.position.replica for one in workers if one.position is not None)
    at: dict[MeshPosition, int] = {}
    for part in range(shape.num_parts):
        held = [one for one in workers if one.position is not None and one.position.part == part]
        held.sort(key=lambda one: _preference(one, num_in, shape))
        kept, moved = {}, []
        for one in held[:num_replicas]:
            position = one.position
            assert position is not None
            if position.replica < num_replicas and position not in kept:
                kept[position] = one.index
            else:
                moved.append(one.index)
        of_part = (MeshPosition(replica, part) for replica in range(num_replicas))
        at |= kept | dict(zip((p for p in of_part if p not in kept), moved, strict=False))
    ranks = [shape.position(rank, world_size) for rank in range(world_size)]
    others = [one.index for one in workers if one.index not in at.values()]
    empty = [position for position in ranks if position not in at]
    at |= dict(zip(empty, others, strict=False))
    return tuple(at[position] for position in ranks), tuple(others[len(empty) :])


def _preference(
    one: Seated, num_in: Mapping[int, int], shape: MeshShape
) -> tuple[int, bool, int, int]:
    """Return the sort key of a worker among the workers with the same part. num_in: number of
    workers of each replica."""
    assert one.position is not None
    replica = one.position.replica
    return one.since, num_in[replica] < shape.num_parts, replica, one.index


def has_all_parts(positions: Iterable[MeshPosition | None], shape: MeshShape) -> bool:
    """Whether workers at these positions together have the whole model."""
    return len({one.part for one in positions if one is not None}) == shape.num_parts
