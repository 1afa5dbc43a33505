"""The clients of a round that a rank simulates, and the samples of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Piece, Share
from ray_workers.training.data.sampler import Batch, derive_seed
from ray_workers.training.parallel.federated.rounds import Participant, RoundPlan


@dataclass(frozen=True)
class RoundShare(Share):
    """A rank's part of a round. The part contains no samples, because the clients have the
    samples."""

    plan: RoundPlan
    owners: Sequence[int]
    """The rank that simulates each participant."""

    @classmethod
    def of(cls, plan: RoundPlan, owners: Sequence[int] | None = None, **more: Any) -> Self:
        """owners: None if rank 0 simulates all participants. more: the fields of a subclass."""
        batch = Batch(0, torch.empty(0, dtype=torch.int64), plan.num_samples, is_empty=True)
        return cls(batch, [], plan, owners or [0] * len(plan.participants), **more)

    def own(self, rank: int) -> Iterator[tuple[int, Participant]]:
        """Yield (index among all participants, participant) for each participant that a rank
        simulates."""
        for index, participant in enumerate(self.plan.participants):
            if self.owners[index] == rank:
                yield index, participant


class RoundFeed:
    """The methods of a feed of rounds that are the same regardless of where the clients are.
    Subclasses define `at`, which returns the round that belongs to a step, as a single share."""

    def end_batches(self, *_: object) -> None:
        """Do nothing, because a round is one step."""

    def close(self) -> None:
        """Do nothing, because nothing is read ahead."""


def batches_of(
    samples: InMemorySamples | MemoryMappedSamples,
    own: Tensor,
    num_steps: int,
    batch_size: int,
    *seed: int,
) -> Iterator[Piece]:
    """Yield (inputs, targets) for each step of a client in a round. `own` contains the numbers of
    the client's samples. Each local epoch visits the samples in a different order.

    seed: the seed of the job, the round and the client.
    """
    generator = torch.Generator().manual_seed(derive_seed("client", *seed))
    left = num_steps
    while left:
        order = own[torch.randperm(len(own), generator=generator)]
        pieces: Sequence[Tensor] = torch.split(order, batch_size)[:left]
        left -= len(pieces)
        for at in pieces:
            yield samples.take(at)
