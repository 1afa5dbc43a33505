"""A rank's clients in each round, with the samples of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feeding, Piece, Share
from ray_workers.training.data.sampler import Batch, derive_seed
from ray_workers.training.parallel.federated.partition import Numbers
from ray_workers.training.parallel.federated.rounds import Participant, RoundPlan, Rounds, deal


@dataclass(frozen=True)
class RoundShare(Share):
    """A rank's part of a round."""

    plan: RoundPlan
    owners: Sequence[int]
    """The rank of each participant."""

    def own(self, rank: int) -> Iterator[tuple[int, Participant]]:
        """(place among all participants, participant) of those that a rank plays."""
        for place, participant in enumerate(self.plan.participants):
            if self.owners[place] == rank:
                yield place, participant


@dataclass(frozen=True)
class PlayedShare(RoundShare):
    """A rank's part of a round in a simulation. The samples of its clients are read when they are
    asked for."""

    feed: ClientFeed

    def batches(self, participant: Participant) -> Iterator[Piece]:
        """(inputs, targets) of each step of a client."""
        return self.feed.batches(self.plan.number, participant)


def client_seed(seed: int, round_number: int, client: int) -> int:
    """That of the order of a client's samples in a round."""
    return derive_seed("client", seed, round_number, client)


def local_batches(own: Tensor, batch_size: int, num_steps: int, seed: int) -> Iterator[Tensor]:
    """The numbers of the samples of each step of a client: in each local epoch it goes over its
    samples, `own`, in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    left = num_steps
    while left:
        order = own[torch.randperm(len(own), generator=generator)]
        pieces: Sequence[Tensor] = torch.split(order, batch_size)[:left]
        left -= len(pieces)
        yield from pieces


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

    def at(self, step: int) -> Feeding:
        """The round `step`, as one share."""
        plan = self._rounds.plan(step)
        batch = Batch(0, torch.empty(0, dtype=torch.int64), plan.num_samples, is_empty=True)
        owners = deal(plan.participants, self._world_size)
        return Feeding(plan.num_samples, [PlayedShare(batch, [], plan, owners, self)])

    def batches(self, round_number: int, participant: Participant) -> Iterator[Piece]:
        """(inputs, targets) of each step of a client."""
        own = torch.from_numpy(self._clients[participant.client])
        seed = client_seed(self._seed, round_number, participant.client)
        for at in local_batches(own, self._batch_size, participant.num_steps, seed):
            yield self._samples.take(at)

    def end_batches(self, *_: object) -> None:
        """A round is one step."""

    def close(self) -> None:
        """Nothing is read ahead."""
