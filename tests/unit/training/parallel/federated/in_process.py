"""Runs a federated job round by round in the process of a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.devices import CPU
from ray_workers.training.parallel import Strategy, StrategyContext, strategy_of
from ray_workers.training.parallel.gradients import Pass


class Server:
    """The strategy of a job on its only rank."""

    def __init__(
        self,
        document: dict[str, Any],
        change: Callable[[nn.Module], nn.Module] = lambda model: model,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """change: converts the recipe's model to another one."""
        spec = JobSpec.model_validate(document)
        assert spec.recipe is not None
        assert spec.federated is not None
        self.spec = spec
        found = RECIPES[spec.recipe].build(spec, DataPolicy.open())
        self.workload = dataclasses.replace(found, model=change(found.model))
        calendar = Calendar.of_rounds(spec.federated.rounds, 1, spec.checkpoint)
        self.page = HeartbeatPage(None)
        given = StrategyContext(spec, self.workload, CPU, calendar, self.page, "")
        self.strategy: Strategy = strategy_of(given)
        self.strategy.join_group(rank, world_size)
        self.feed = self.strategy.feed(on_device(self.workload.train, CPU))
        self.strategy.prepare(self.feed, 0)

    def play(self, number: int) -> dict[str, float]:
        """Run a round, and return its metrics."""
        self.train(number)
        self.strategy.update.step(self.spec.train.optimizer.lr)
        self.strategy.after_step(number)
        return self.strategy.gradients.step_metrics()

    def train(self, number: int) -> None:
        """Run a round up to the server's step."""
        shares = self.feed.at(number).shares
        self.strategy.gradients.backward(Pass(shares))

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.strategy.model.named_buffers())

    def weights(self) -> dict[str, Tensor]:
        found = self.strategy.model.state_dict()
        return {name: tensor.clone() for name, tensor in found.items()}
