"""A federated job in the process of a test, round by round."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.devices import CPU
from ray_workers.training.parallel import Strategy, StrategyContext, strategy_of


class Server:
    """The strategy of a job as its only rank has it."""

    def __init__(self, document: dict[str, Any]) -> None:
        spec = JobSpec.model_validate(document)
        assert spec.recipe is not None
        assert spec.federated is not None
        self.spec = spec
        self.workload = RECIPES[spec.recipe].build(spec, DataPolicy.open())
        calendar = Calendar.of_rounds(spec.federated.rounds, 1, spec.checkpoint)
        self.page = HeartbeatPage(None)
        given = StrategyContext(spec, self.workload, CPU, calendar, self.page, "")
        self.strategy: Strategy = strategy_of(given)
        self.strategy.join_group(0, 1)
        self.feed = self.strategy.feed(on_device(self.workload.train, CPU))
        self.strategy.prepare(self.feed, 0)

    def play(self, number: int) -> dict[str, float]:
        """A round; its metrics."""
        self.train(number)
        self.strategy.update.step(self.spec.train.optimizer.lr)
        self.strategy.after_step(number)
        return self.strategy.gradients.step_metrics()

    def train(self, number: int) -> None:
        """A round up to the server's step."""
        shares = self.feed.at(number).shares
        self.strategy.gradients.backward(shares, None, lambda _: None, lambda: None)

    def weights(self) -> dict[str, Tensor]:
        found = self.strategy.model.state_dict()
        return {name: tensor.clone() for name, tensor in found.items()}
