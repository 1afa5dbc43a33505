"""The strategy of a simulation: any rank plays any client."""

from __future__ import annotations

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.federated.rounds import Rounds
from ray_workers.training.parallel.federated.simulation.client_feed import ClientFeed
from ray_workers.training.parallel.federated.simulation.partition import ClientSamples, divide
from ray_workers.training.parallel.federated.simulation.simulated_engine import SimulatedEngine
from ray_workers.training.parallel.federated.strategy import ServerStrategy
from ray_workers.training.parallel.strategy import StrategyContext


class FederatedStrategy(ServerStrategy):
    """Each rank plays some of the clients of a round. The weights do not depend on the number of
    ranks."""

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given, SimulatedEngine(given))
        workload, seed = given.workload, given.spec.train.seed
        options = self._options
        self.clients: ClientSamples = divide(
            options.partition, options.clients, workload.train, workload.validation, seed
        )
        sizes = [len(numbers) for numbers in self.clients.train]
        self._rounds = Rounds(options, sizes, seed)

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        drawn = self.clients.train, self._rounds
        options = self._options.batch_size, self.options.seed
        return ClientFeed(samples, *drawn, *options, self.world_size)
