"""Gangs of unlike slots: some roles have resources of their own. All ranks are placed, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.placement.placement import Placement
from service.domain.scheduling.placement.slots import Request, add, count, fits
from service.domain.scheduling.placement.topology import Topology


def place_unlike(
    request: Request, free: Mapping[str, Mapping[str, float]], topology: Topology
) -> tuple[Slice, ...]:
    """Slices of all ranks, in the order of the ranks, each near those placed before; none if they
    have no room together. free: the resources of nodes, by their ids."""
    runs = request.runs
    alike = [at for at, (_, bundle) in enumerate(runs) if bundle is request.bundle]
    own = [at for at in range(len(runs)) if at not in alike]
    own.sort(key=lambda at: _size(runs[at][1]), reverse=True)
    # Ranks without resources of their own may have taken the only room that the others could use.
    for order in ([*alike, *own], [*own, *alike]):
        if found := _place([runs[at] for at in order], free, topology):
            of_run = dict(zip(order, found, strict=True))
            return tuple(part for at in range(len(runs)) for part in of_run[at])
    return ()


def _size(bundle: Mapping[str, float]) -> tuple[float, float]:
    return bundle.get("CPU", 0.0), bundle.get("memory", 0.0)


def _place(
    runs: Sequence[tuple[int, Mapping[str, float]]],
    free: Mapping[str, Mapping[str, float]],
    topology: Topology,
) -> list[tuple[Slice, ...]]:
    """Of each run of ranks with equal bundles; empty if one has no room."""
    left = {node_id: dict(has) for node_id, has in free.items()}
    found: list[tuple[Slice, ...]] = []
    for number, bundle in runs:
        sizes = {node_id: size for node_id, has in left.items() if (size := fits(bundle, has))}
        if sum(sizes.values()) < number:
            return []
        near = [part.node_id for slices in found for part in slices]
        found.append(Placement(topology, sizes).pack(number, near))
        assert count(found[-1]) == number
        for part in found[-1]:
            add(left[part.node_id], bundle, -part.num_workers)
    return found
