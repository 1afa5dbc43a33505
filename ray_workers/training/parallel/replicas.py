"""Compares the replicas of a model by checksums, and finds the ranks whose replica is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dray.train.prepared.copies import checksum
from dray.train.prepared.dtensor import local
from ray_workers.training import devices
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
    num_compared: int = 0
    """Number of ranks of which at least one part was compared with another rank's part."""


class ReplicaGroup:
    """This rank among the ranks that hold replicas of the model."""

    rank = 0
    world_size = 1
    device: torch.device
    _hardware: list[object] | None = None
    """The result of `hardware` in the current group."""

    def replicated(self) -> Sequence[Replicated]:
        """Return the parts of the state of which other ranks hold equal copies after every step;
        empty if each rank has its own weights, or if there are no replicas."""
        return ()

    def hardware(self) -> list[object]:
        """Return, for each rank, a value that is equal on ranks whose devices compute bitwise equal
        results. The first call in a group is a collective."""
        if self._hardware is None:
            mine: object = devices.arithmetic(self.device)
            self._hardware = process_group.gathered(mine, self.world_size)
        return self._hardware

    def compare_copies(self, left_out: Collection[int] = ()) -> ReplicaComparison:
        """Compare the weights and optimizer states that should be equal between ranks. Only
        replicas on equal hardware are compared, because other replicas can differ without a fault.
        left_out: ranks that are not compared. A collective."""
        parts = self.replicated()
        if self.world_size == 1 or not parts:
            return ReplicaComparison(0, ())
        hardware = self.hardware()
        kinds = [
            (tuple(hardware[r] for r in self.replica_of(rank)), rank if rank in left_out else None)
            for rank in range(self.world_size)
        ]
        return compare(parts, self.device, kinds)

    def replica_of(self, rank: int) -> Sequence[int]:
        """Return, in order, the ranks that together with this rank hold a whole replica. The
        results of any of these ranks can influence the state of all of them."""
        return (rank,)

    def flip_bit(self) -> None:
        """Flip a bit of a parameter that this rank updates, as a memory fault would."""
        parts = (local(parameter) for parameter in self.updated_parameters())
        flip_bit(next(part for part in parts if part.numel()))

    def updated_parameters(self) -> Iterable[Tensor]:
        """Return the parameters that this rank's optimizer updates."""
        raise NotImplementedError


def compare(
    parts: Sequence[Replicated], device: torch.device, kinds: Sequence[Hashable]
) -> ReplicaComparison:
    """Compare the copies of all ranks. A collective operation with one small message. Every rank
    passes the same number of parts.

    kinds: the kind of each rank; only the copies of ranks of the same kind are compared.
    """
    world_size = len(kinds)
    numbers = [number for part in parts for number in checksum(part.tensors)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    everyones = torch.stack(gathered).view(world_size, len(parts), 2).tolist()
    process_group.wait_for_results(device)
    by_part = [[tuple(of_rank[n]) for of_rank in everyones] for n in range(len(parts))]
    holders = [[(part.holder_of(rank), kind) for rank, kind in enumerate(kinds)] for part in parts]
    return judge(by_part, holders)


def judge(
    checksums: Sequence[Sequence[tuple[int, ...]]], holders: Sequence[Sequence[Hashable]]
) -> ReplicaComparison:
    """Return the result of a comparison. Both arguments contain, for each part, an item for each
    rank: in `checksums`, the rank's checksum, and in `holders`, a value that is equal on the ranks
    whose parts are compared.

    The first part in which ranks differ determines the ranks that differ. The first part in which
    ranks differ from a majority determines the ranks at fault. A fault in this part might have
    spread to the later parts of other ranks. Pure.
    """
    differing: set[int] = set()
    culprits: set[int] = set()
    compared: set[int] = set()
    for of_part, holder_of in zip(checksums, holders, strict=True):
        ranks_of: dict[Hashable, list[int]] = {}
        for rank, holder in enumerate(holder_of):
            ranks_of.setdefault(holder, []).append(rank)
        found: set[int] = set()
        named: set[int] = set()
        for ranks in ranks_of.values():
            compared.update(ranks if len(ranks) > 1 else ())
            ((usual, count),) = Counter(of_part[rank] for rank in ranks).most_common(1)
            others = {rank for rank in ranks if of_part[rank] != usual}
            found |= others
            if 2 * count > len(ranks):
                named |= others
        differing, culprits = differing or found, culprits or named
    return ReplicaComparison(len(differing), tuple(sorted(culprits)), len(compared))


@torch.no_grad()
def flip_bit(tensor: Tensor) -> None:
    """Flip one bit of the first element: the highest bit of the mantissa, if it is a 32-bit
    float."""
    byte = tensor.detach().view(-1)[:1].view(torch.uint8)[max(tensor.element_size() - 2, 0) :]
    byte[:1].bitwise_xor_(64)
