"""The strategy of a simulation, in which any rank can simulate any client. The ranks train the
clients, and mask their updates if the document requests it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed, Piece
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.federated.aggregation.received import (
    ReceivedUpdates,
    UpdateTable,
)
from ray_workers.training.parallel.federated.aggregation.update_checks import Verdict
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.client_training import ClientTraining
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.federated.masking_values import needing_cryptography
from ray_workers.training.parallel.federated.rounds import Participant, Rounds
from ray_workers.training.parallel.federated.server import ServerStrategy
from ray_workers.training.parallel.federated.simulation.client_feed import (
    ClientFeed,
    SimulatedShare,
)
from ray_workers.training.parallel.federated.simulation.partition import divide
from ray_workers.training.parallel.gradients import EngineParts, Pass
from ray_workers.training.parallel.strategy import StrategyContext

if TYPE_CHECKING:
    from ray_workers.training.parallel.federated.simulation.secure_round import SecureRound


class SimulatedEngine(FederatedEngine):
    """Trains this rank's clients, one after the other."""

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given)
        self._counted: dict[int, Tensor] = {}
        """The integer buffers of this rank's clients in the last round."""
        self._secure_rounds: type[SecureRound] | None = None
        if self._options.secure_aggregation is not None:
            with needing_cryptography():
                from ray_workers.training.parallel.federated.simulation.secure_round import (
                    SecureRound,
                )
            self._secure_rounds = SecureRound

    @cached_property
    def _clients(self) -> ClientTraining:
        workload = self._given.workload
        parts = EngineParts(workload.model, workload.loss_sum, self._given.autocast)
        return ClientTraining(parts, self._train, self._options)

    def backward(self, work: Pass) -> None:
        self._counted.clear()
        if self._secure_rounds is None:
            super().backward(work)
            return
        mine = work.share
        assert isinstance(mine, SimulatedShare)
        work.before_exchange()
        group, page = (self.rank, self._world_size), self._given.page
        secure = self._secure_rounds(self._options, mine, self._flat.num_elements, *group, page)
        secure.exchange_keys()
        page.compute()
        table = UpdateTable(mine.plan, self._given.device)
        for each in self._updates(mine, work.prepare):
            norm, loss, sender = each.norm, each.loss, each.participant
            if each.verdict is Verdict.ACCEPTED:
                is_within = self._clipping is None or self._clipping.clip(each.update, norm)
                weight = sender.num_samples if self._clipping is None else 1
                secure.send(sender.client, each.update, weight, loss, is_within=is_within)
                norm = loss = math.nan  # the server does not learn them
            table.note(each.position, each.verdict, norm, loss)
        work.before_exchange()
        received = table.of_all(self._world_size)
        self._take(mine, received, self._of_sum(received, secure.total()))

    def _update_of(self, participant: Participant, mine: RoundShare) -> tuple[Tensor, float]:
        assert isinstance(mine, SimulatedShare)
        number, correction = mine.plan.number, self.algorithm.configure(participant.client)
        batches = self._moving(mine.batches(participant))
        update, loss = self._clients.train(batches, self._lr(number), correction)
        if self._flat.integers:
            self._counted[participant.client] = self._clients.integer_buffers
        if participant.attacks:
            update = self._poisoned(update, number, participant.client)
        return update, loss

    def _integers(self, mine: RoundShare, received: ReceivedUpdates) -> Tensor | None:
        """Return the buffers of the accepted client with the most samples (in a tie, the first
        client). Counters, such as a BatchNorm's number of batches, can't be averaged. A
        collective."""
        accepted, participants = received.accepted, mine.plan.participants
        if not self._flat.integers or not accepted:
            return None
        index = max(accepted, key=lambda at: (participants[at].num_samples, -at))
        found = torch.zeros_like(self._flat.integer_values())
        if mine.owners[index] == self.rank:
            found += self._counted[participants[index].client]
        process_group.add_up(found, self._world_size)
        return found

    def _moving(self, batches: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the batches, and report progress at each batch, so that a client with many steps is
        not mistaken for a hang."""
        for batch in batches:
            self._given.page.move()
            yield batch

    def _poisoned(self, update: Tensor, round_number: int, client: int) -> Tensor:
        attack = self._options.attack
        assert attack is not None
        match attack.kind:
            case "sign_flip":
                return update * -attack.scale
            case "nan":
                return torch.full_like(update, math.nan)
            case "noise":
                seed = derive_seed("attack", self._train.seed, round_number, client)
                generator = torch.Generator().manual_seed(seed)
                noise = torch.randn(len(update), generator=generator).to(update)
                norm = float(torch.linalg.vector_norm(update))
                return noise * (attack.scale * norm / math.sqrt(len(update)))


class FederatedStrategy(ServerStrategy):
    """Each rank simulates some of the clients of a round. The weights don't depend on the number of
    ranks."""

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given, SimulatedEngine(given))
        workload, seed = given.workload, given.spec.train.seed
        options = self._options
        divided = divide(
            options.partition, options.clients, workload.train, workload.validation, seed
        )
        self._samples, self.clients = divided.train, divided.validation
        sizes = [len(numbers) for numbers in self._samples]
        self._rounds = Rounds(options, sizes, seed)

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        drawn = self._samples, self._rounds
        options = self._options.batch_size, self.options.seed
        return ClientFeed(samples, *drawn, *options, self.world_size)
