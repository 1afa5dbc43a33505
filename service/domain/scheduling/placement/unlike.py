"""Gangs of unlike slots: workers, and servers with resources of their own. All of them are placed,
or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_workers.shared.contracts import ServerSlots, Slice
from service.domain.scheduling.placement.placement import Placement
from service.domain.scheduling.placement.slots import add, count, fits
from service.domain.scheduling.placement.topology import Topology


def place_unlike(
    num_workers: int,
    bundle: Mapping[str, float],
    servers: ServerSlots,
    free: Mapping[str, Mapping[str, float]],
    topology: Topology,
) -> tuple[Slice, ...]:
    """Slices of the workers, and then those of the servers, near the workers; none if they have no
    room together. free: the resources of nodes, by their ids."""
    workers, serving = (bundle, num_workers - servers.number), (servers.bundle, servers.number)
    both = _place([workers, serving], free, topology)
    if both:
        return (*both[0], *both[1])
    # Workers may have taken the only room that servers could use.
    both = _place([serving, workers], free, topology)
    return (*both[1], *both[0]) if both else ()


def _place(
    parts: Sequence[tuple[Mapping[str, float], int]],
    free: Mapping[str, Mapping[str, float]],
    topology: Topology,
) -> list[tuple[Slice, ...]]:
    """Of each part; empty if one has no room."""
    left = {node_id: dict(has) for node_id, has in free.items()}
    found: list[tuple[Slice, ...]] = []
    for bundle, number in parts:
        sizes = {node_id: size for node_id, has in left.items() if (size := fits(bundle, has))}
        if sum(sizes.values()) < number:
            return []
        near = [part.node_id for slices in found for part in slices]
        found.append(Placement(topology, sizes).pack(number, near))
        assert count(found[-1]) == number
        for part in found[-1]:
            add(left[part.node_id], bundle, -part.num_workers)
    return found
