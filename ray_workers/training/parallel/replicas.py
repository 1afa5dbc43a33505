"""Compares the replicas of a model by checksums, and finds the ranks whose replica is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dray.train.prepared.copies import checksum
from ray_workers.training.elastic import process_group


@dataclass(frozen=True)
class Replicated:
    """A part of this rank's state, of which other ranks hold copies."""

    tensors: Iterable[Tensor]
    holder_of: Callable[[int], int]
    """Returns the lowest rank that holds a copy of the part that the given rank holds."""


@dataclass(frozen=True)
class ReplicaComparison:
    """The result of a comparison, which is the same on all ranks."""

    num_differing: int
    """Number of ranks outside of the largest sets of equal ranks; 0 if all copies are equal."""
    culprits: tuple[int, ...]
    """Ranks that differ from a majority of the ranks with the same part, in order. Ranks of a part
    without a majority are not included."""


def compare(
    parts: Sequence[Replicated], device: torch.device, world_size: int
) -> ReplicaComparison:
    """Compare the copies of all ranks. A collective operation with one small message. Every rank
    passes the same number of parts."""
    if world_size == 1 or not parts:
        return ReplicaComparison(0, ())
    numbers = [number for part in parts for number in checksum(part.tensors)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    everyones = torch.stack(gathered).view(world_size, len(parts), 2).tolist()
    process_group.wait_for_results(device)
    by_part = [[tuple(of_rank[n]) for of_rank in everyones] for n in range(len(parts))]
    holders = [[part.holder_of(rank) for rank in range(world_size)] for part in parts]
    return judge(by_part, holders)


def judge(
    checksums: Sequence[Sequence[tuple[int, ...]]], holders: Sequence[Sequence[int]]
) -> ReplicaComparison:
    """Return the result of a comparison. Both arguments contain an item for each rank of each part:
    the rank's checksum, and a number that is equal on the ranks that hold the same part. Pure."""
    differing: set[int] = set()
    culprits: set[int] = set()
    for of_part, holder_of in zip(checksums, holders, strict=True):
        for holder in set(holder_of):
            ranks = [rank for rank, other in enumerate(holder_of) if other == holder]
            ((usual, count),) = Counter(of_part[rank] for rank in ranks).most_common(1)
            others = {rank for rank in ranks if of_part[rank] != usual}
            differing |= others
            if 2 * count > len(ranks):
                culprits |= others
    return ReplicaComparison(len(differing), tuple(sorted(culprits)))


@torch.no_grad()
def flip_bit(tensor: Tensor) -> None:
    """Flip one bit of the first element: the highest bit of the mantissa, if it is a 32-bit
    float."""
    byte = tensor.detach().view(-1)[:1].view(torch.uint8)[max(tensor.element_size() - 2, 0) :]
    byte[:1].bitwise_xor_(64)
