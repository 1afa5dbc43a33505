"""The samples of the clients that a rank simulates, which are parts of the job's data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feeding, Piece
from ray_workers.training.parallel.federated.client_batches import (
    RoundFeed,
    RoundShare,
    batches_of,
)
from ray_workers.training.parallel.federated.rounds import Participant, Rounds, assign
from ray_workers.training.parallel.strategy import Numbers


@dataclass(frozen=True)
class SimulatedShare(RoundShare):
    """A rank's part of a round. The samples of the rank's clients are read on request."""

    feed: ClientFeed

    def batches(self, participant: Participant) -> Iterator[Piece]:
        """Yield (inputs, targets) for each step of a client."""
        return self.feed.batches(self.plan.number, participant)


class ClientFeed(RoundFeed):
    """A rank's part of each round."""

    def __init__(
        self,
        samples: InMemorySamples | MemoryMappedSamples,
        clients: Sequence[Numbers],
        rounds: Rounds,
        batch_size: int,
        seed: int,
        world_size: int,
    ) -> None:
        """clients: the indices of each client's samples."""
        self._samples = samples
        self._clients = clients
        self._rounds = rounds
        self._batch_size = batch_size
        self._seed = seed
        self._world_size = world_size

    @property
    def most_samples(self) -> int:
        """The largest number of samples of any client."""
        return max(map(len, self._clients))

    def at(self, step: int) -> Feeding:
        plan = self._rounds.plan(step)
        owners = assign(plan.participants, self._world_size)
        return Feeding(plan.num_samples, [SimulatedShare.of(plan, owners, feed=self)])

    def batches(self, round_number: int, participant: Participant) -> Iterator[Piece]:
        """Like `batches_of`, but for a participant of a round."""
        own = torch.from_numpy(self._clients[participant.client])
        seed = self._seed, round_number, participant.client
        return batches_of(self._samples, own, participant.num_steps, self._batch_size, *seed)
