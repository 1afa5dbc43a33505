"""Sends shares of a divided state between the memories of ranks, and decides which ranks keep and
send which shares.

The same idea is in Gemini (Wang et al. 2023, 'GEMINI: Fast Failure Recovery in Distributed Training
with In-Memory Checkpoints', SOSP).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_workers.training.checkpoint import safetensors_layout
from ray_workers.training.elastic import process_group

Holding = tuple[int, int]
"""(rank whose share is held, number of optimizer steps after which it was taken)"""


@dataclass(frozen=True)
class PeerShare:
    """One rank's share of the state after a step, in this process's memory."""

    rank: int
    step: int
    tree: Any
    data: Tensor
    """The bytes of a safetensors file, padded to the end of a page."""

    @property
    def holding(self) -> Holding:
        return self.rank, self.step

    def state(self) -> Any:
        """Return the state, in new memory."""
        tensors = safetensors_layout.views(self.data)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return safetensors_layout.restore(self.tree, copies)


def keepers(nodes: Sequence[str], copies: int) -> list[list[int]]:
    """Return, for each rank, the ranks that keep its share. nodes: the node of each rank.

    Each rank keeps the shares of `copies` other ranks. Ranks on the same node are neighbours in a
    ring, so a shift by the number of ranks on the largest node leads to a rank on another node,
    unless most ranks are on the largest node.
    """
    num = len(nodes)
    ring = sorted(range(num), key=lambda rank: (nodes[rank], rank))
    largest = max(Counter(nodes).values())
    shifts = [*range(largest, num), *range(1, min(largest, num))][:copies]
    at = {rank: index for index, rank in enumerate(ring)}
    return [[ring[(at[rank] + shift) % num] for shift in shifts] for rank in range(num)]


def newest_whole(held: Sequence[Collection[Holding]]) -> int | None:
    """Return the newest step for which the ranks together hold the shares of all ranks; None if
    there is none. held: what each rank holds."""
    union = {one for each in held for one in each}
    steps = sorted({step for _, step in union}, reverse=True)
    whole = (step for step in steps if all((rank, step) in union for rank in range(len(held))))
    return next(whole, None)


def senders(held: Sequence[Collection[Holding]], step: int) -> dict[int, int]:
    """Return, for each rank that does not hold its own share, the rank that sends this share to
    it."""
    return {
        rank: next(other for other, each in enumerate(held) if (rank, step) in each)
        for rank, own in enumerate(held)
        if (rank, step) not in own
    }


def exchange(
    group: dist.ProcessGroup,
    sent: Mapping[int, PeerShare],
    sources: Iterable[int],
    memory_for: Callable[[int, int], Tensor],
) -> list[PeerShare]:
    """Send shares to other ranks, and return the shares from `sources`, in order.

    sent: shares by receiving rank. memory_for: returns memory for the share of a source that has
    this number of bytes.
    """
    sources = list(sources)
    texts = {rank: _bytes_of(share.tree) for rank, share in sent.items()}
    heads = {
        rank: torch.tensor([share.rank, share.step, texts[rank].numel(), share.data.numel()])
        for rank, share in sent.items()
    }
    found = {rank: torch.empty(4, dtype=torch.int64) for rank in sources}
    _transfer(group, heads, found)
    numbers = {rank: head.tolist() for rank, head in found.items()}
    trees = {rank: torch.empty(one[2], dtype=torch.uint8) for rank, one in numbers.items()}
    _transfer(group, texts, trees)
    data = {rank: memory_for(rank, one[3]) for rank, one in numbers.items()}
    _transfer(group, {rank: share.data for rank, share in sent.items()}, data)
    return [
        PeerShare(one[0], one[1], json.loads(trees[rank].numpy().tobytes()), data[rank])
        for rank, one in numbers.items()
    ]


def gathered(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers that the ranks of the group passed, indexed by rank. A collective
    operation."""
    mine = torch.tensor(numbers)
    all_of_them = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_of_them, mine, group=group)
    return [each.tolist() for each in all_of_them]


def _bytes_of(tree: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)


def _transfer(
    group: dist.ProcessGroup, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
) -> None:
    """Send and receive one-dimensional tensors in pieces, one piece of each tensor at a time."""
    parts = [
        (begin, rank, process_group.pieces(tensor))
        for begin, tensors in ((dist.isend, sent), (dist.irecv, received))
        for rank, tensor in tensors.items()
    ]
    for number in range(max((len(pieces) for _, _, pieces in parts), default=0)):
        works = [
            begin(pieces[number], rank, group=group)
            for begin, rank, pieces in parts
            if number < len(pieces) and pieces[number].numel()
        ]
        for work in works:
            assert work is not None
            work.wait()
