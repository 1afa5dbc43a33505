"""A rank's clients in each round, with the samples of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feeding, Piece, Share
from ray_workers.training.data.sampler import Batch, derive_seed
from ray_workers.training.parallel.federated.rounds import Participant, RoundPlan, Rounds, deal
from ray_workers.training.parallel.federated.simulation.partition import Numbers


@dataclass(frozen=True)
class RoundShare(Share):
    """A rank's part of a round. The samples of its clients are read when they are asked for."""

    plan: RoundPlan
    owners: Sequence[int]
    """The rank of each participant."""
    feed: ClientFeed | None
    """None where the clients have their samples elsewhere."""

    def own(self, rank: int) -> Iterator[tuple[int, Participant]]:
        """(place among all participants, participant) of those that a rank plays."""
        for place, participant in enumerate(self.plan.participants):
            if self.owners[place] == rank:
                yield place, participant

    def batches(self, participant: Participant) -> Iterator[Piece]:
        """(inputs, targets) of each step of a client."""
        assert self.feed is not None
        return self.feed.batches(self.plan.number, participant)


class ClientFeed:
    """The parts of a rank in all rounds."""

    def __init__(
        self,
        samples: InMemorySamples | MemoryMappedSamples,
        clients: Sequence[Numbers],
        rounds: Rounds,
        batch_size: int,
        seed: int,
        world_size: int,
    ) -> None:
        """clients: the numbers of the samples of each client."""
        self._samples = samples
        self._clients = clients
        self._rounds = rounds
        self._batch_size = batch_size
        self._seed = seed
        self._world_size = world_size

    @property
    def most_samples(self) -> int:
        """Of a client."""
        return max(map(len, self._clients))

    def at(self, step: int) -> Feeding:
        """The round `step`, as one share."""
        plan = self._rounds.plan(step)
        batch = Batch(0, torch.empty(0, dtype=torch.int64), plan.num_samples, is_empty=True)
        owners = deal(plan.participants, self._world_size)
        return Feeding(plan.num_samples, [RoundShare(batch, [], plan, owners, self)])

    def batches(self, round_number: int, participant: Participant) -> Iterator[Piece]:
        """As `batches_of`."""
        own = torch.from_numpy(self._clients[participant.client])
        seed = derive_seed("client", self._seed, round_number, participant.client)
        return batches_of(self._samples, own, participant.num_steps, self._batch_size, seed)

    def end_batches(self, *_: object) -> None:
        """A round is one step."""

    def close(self) -> None:
        """Nothing is read ahead."""


def batches_of(
    samples: InMemorySamples | MemoryMappedSamples,
    own: Tensor,
    num_steps: int,
    batch_size: int,
    seed: int,
) -> Iterator[Piece]:
    """(inputs, targets) of each step of a client, whose samples have the numbers `own`. In each
    local epoch it goes over them in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    left = num_steps
    while left:
        order = own[torch.randperm(len(own), generator=generator)]
        pieces: Sequence[Tensor] = torch.split(order, batch_size)[:left]
        left -= len(pieces)
        for at in pieces:
            yield samples.take(at)
