"""The part of the strategies of federated jobs that they have in common: a round is a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_workers.training.parallel.data_parallel.ddp import Ddp, ReplicaSync
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.federated.server_optimizers import ServerStep
from ray_workers.training.parallel.strategy import StrategyContext


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


class ServerStrategy(Ddp):
    """All ranks, mostly one, have the server's weights and state."""

    def __init__(self, given: StrategyContext, engine: FederatedEngine) -> None:
        options = given.spec.federated
        assert options is not None
        self._options = options
        self._engine = engine
        super().__init__(
            given, engine, ServerStep(given, engine, options), ServerState(given, engine)
        )

    def join_group(self, rank: int, world_size: int) -> None:
        super().join_group(rank, world_size)
        self._engine.rank = rank
