"""Combines the updates of a round, with bitwise equal results on any number of ranks.

Means are computed with integer sums, because the sum of integers doesn't depend on the order:
updates, whose norms are bounded, are rounded to multiples of a power of two. Secure aggregation
also requires integer sums. For other aggregators, every rank gets all updates of the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dray.spec.federated.parts import Aggregator
from ray_workers.training.elastic import process_group

BITS = 61
"""Number of bits of a sum, not counting the sign bit and one bit that is reserved for rounding."""
SORTED_AT_ONCE = 2**24
"""Number of elements, over all updates, that are sorted at the same time."""


class FixedPointSum:
    """A weighted sum of updates. The weights on all ranks sum to at most 1."""

    def __init__(self, num_elements: int, max_norm: float, device: torch.device) -> None:
        """max_norm: the maximum norm of an update."""
        self._scale = 2.0 ** (BITS - max(0, math.ceil(math.log2(max_norm))))
        self._sum = torch.zeros(num_elements, dtype=torch.int64, device=device)

    def add(self, update: Tensor, weight: float) -> None:
        self._sum += (update.double() * (weight * self._scale)).round_().long()

    def total(self, world_size: int) -> Tensor:
        """Return the sum over all ranks as float64. A collective operation."""
        process_group.add_up(self._sum, world_size)
        return self._sum.double() / self._scale


def rows_of_all(mine: Sequence[Tensor], owners: Sequence[int], like: Tensor) -> Tensor:
    """Gather the updates of all participants of a round on every rank, in order: (participants,
    elements). A collective operation.

    mine: this rank's updates, in order. owners: the rank of each update.
    """
    if not dist.is_initialized():
        return torch.stack(list(mine)) if mine else like.new_empty(0, len(like))
    counts = [owners.count(rank) for rank in range(dist.get_world_size())]
    own = like.new_zeros(max(counts), len(like))
    for row, update in zip(own, mine, strict=False):
        row.copy_(update)
    found = [torch.empty_like(own) for _ in counts]
    dist.all_gather(found, own)
    each = [iter(rows) for rows in found]
    return torch.stack([next(each[rank]) for rank in owners]) if owners else own


def robust(options: Aggregator, rows: Tensor) -> Tensor:
    """Combine updates with a robust aggregator: (updates, elements) -> float64 (elements,).

    Sorting takes six times the memory of the rows, so only some of the elements are sorted at a
    time.
    """
    if options.name == "krum":
        return rows[nearest(rows, options.malicious, options.keep)].double().mean(dim=0)
    parts = torch.split(rows, max(1, SORTED_AT_ONCE // len(rows)), dim=1)
    return torch.cat([_of_each_element(options, part.double()) for part in parts])


def _of_each_element(options: Aggregator, rows: Tensor) -> Tensor:
    match options.name:
        case "mean":
            return rows.mean(dim=0)
        case "median":
            ordered = rows.sort(dim=0).values
            middle = len(rows) // 2
            return (ordered[middle] + ordered[(len(rows) - 1) // 2]) / 2
        case "trimmed_mean":
            ends = options.num_trimmed(len(rows))
            return rows.sort(dim=0).values[ends : len(rows) - ends].mean(dim=0)
        case "krum":
            raise AssertionError("krum compares whole updates, not individual elements")


def nearest(rows: Tensor, malicious: int, keep: int) -> Tensor:
    """Return the indices of the `keep` updates that are closest to their nearest neighbours. Each
    update has len(rows) - malicious - 2 neighbours (Blanchard et al. 2017, equation 1)."""
    exact = rows.double()
    distances = torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist").square_()
    num_neighbours = len(rows) - malicious - 2
    # Skip the smallest distance of each update: the distance between the update and itself, which
    # is 0.
    scores = distances.sort(dim=1).values[:, 1 : 1 + num_neighbours].sum(dim=1)
    return scores.sort(stable=True).indices[:keep].sort().values
