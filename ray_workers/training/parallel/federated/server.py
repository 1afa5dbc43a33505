"""The server of a federated job, and its step (Reddi et al. 2021, arXiv:2003.00295, algorithm 2).

The gradient is the negated mean of the clients' updates, because optimizers step against the
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dray import spec
from dray.spec.federated.parts import ServerOptimizer
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.data_parallel.ddp import Replicas
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.optim.optimizers import parameter_groups
from ray_workers.training.parallel.strategy import StrategyContext


class ServerStep(OptimizerStep):
    """Performs the server's step in each round that counts."""

    def __init__(
        self, given: StrategyContext, engine: FederatedEngine, server: ServerOptimizer
    ) -> None:
        self._server_lr = server.lr
        self._engine = engine
        # The job document's `max_grad_norm` limits the clients' gradients, not the server's.
        options = given.spec.train.model_copy(update={"max_grad_norm": None})
        super().__init__(given.workload.model, engine, options, given.device)

    def _build_optimizer(self, model: nn.Module, options: spec.Optimizer) -> Optimizer:
        """Build the server's optimizer. `options` are the options of the clients."""
        return self._engine.algorithm.optimizer(parameter_groups(model, weight_decay=0.0))

    def step(self, lr: float) -> Tensor:
        """Take a step with the server's learning rate. `lr` is the learning rate of the clients."""
        if not self._engine.counts:
            norm = self._engine.grad_norm()
            self._engine.forget_gradients()
            return norm
        self._engine.change_buffers(self._engine.algorithm.buffer_rate)
        return super().step(self._server_lr)


class ServerStrategy(Replicas):
    """All ranks have the server's weights and state. Usually, there is only one rank."""

    def __init__(self, given: StrategyContext, engine: FederatedEngine) -> None:
        options = given.spec.federated
        assert options is not None
        self._options = options
        self._engine = engine
        super().__init__(given, engine, ServerStep(given, engine, options.server))

    def join_group(self, rank: int, world_size: int) -> None:
        super().join_group(rank, world_size)
        self._engine.rank = rank

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        self._begin_alike()

    def after_step(self, step: int) -> None:
        self._engine.commit()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "federated": self._engine.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._engine.load_state_dict(state["federated"])
