"""The strategy of a federated job: a round is a step, and any rank plays any client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray import spec
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.data_parallel.ddp import Ddp, ReplicaSync
from ray_workers.training.parallel.federated.aggregation.privacy import Accountant
from ray_workers.training.parallel.federated.client_batches import ClientFeed
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.federated.rounds import Rounds
from ray_workers.training.parallel.federated.server_optimizers import ServerStep
from ray_workers.training.parallel.federated.simulation.partition import ClientSamples, divide
from ray_workers.training.parallel.strategy import StrategyContext


def rounds_of(options: spec.Federated) -> int:
    """The number of rounds that the job may take: fewer than the document's where they would spend
    more privacy than it allows. RoundsError if there is none."""
    if options.privacy is None:
        return options.rounds
    accountant = Accountant(options, options.privacy)
    rounds = accountant.most_rounds(options.rounds)
    if rounds == 0:
        raise RoundsError(
            f"federated.privacy.epsilon is {options.privacy.epsilon:g}, and one round spends "
            f"{accountant.epsilon(1):.4g}: allow more, or take a larger noise_multiplier or fewer "
            "clients_per_round"
        )
    return rounds


class ServerState(ReplicaSync):
    """The state that the server keeps besides the weights and its optimizer."""

    def __init__(self, given: StrategyContext, engine: FederatedEngine) -> None:
        super().__init__(given)
        self._engine = engine

    def after_step(self, step: int) -> None:
        self._engine.commit()

    def state_dict(self) -> dict[str, Any]:
        return {"federated": self._engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.load_state_dict(state["federated"])


class FederatedStrategy(Ddp):
    """All ranks have the server's weights and state, and play parts of the clients of each round.
    The weights do not depend on the number of ranks."""

    def __init__(self, given: StrategyContext) -> None:
        options, train = given.spec.federated, given.spec.train
        assert options is not None
        self._engine = FederatedEngine(given)
        update = ServerStep(given, self._engine, options)
        super().__init__(given, self._engine, update, ServerState(given, self._engine))
        workload = given.workload
        self.clients: ClientSamples = divide(
            options.partition, options.clients, workload.train, workload.validation, train.seed
        )
        sizes = [len(numbers) for numbers in self.clients.train]
        self._rounds = Rounds(options, sizes, train.seed)
        self._batch_size = options.batch_size

    def join_group(self, rank: int, world_size: int) -> None:
        super().join_group(rank, world_size)
        self._engine.rank = rank

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        return ClientFeed(
            samples,
            self.clients.train,
            self._rounds,
            self._batch_size,
            self.options.seed,
            self.world_size,
        )
