"""Runs a federated job in this process, round by round, with dray's components but without ranks
and spools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.devices import CPU
from ray_workers.training.loop.client_evaluation import evaluation_of
from ray_workers.training.parallel import StrategyContext, strategy_of
from ray_workers.training.parallel.gradients import Pass


def measured(document: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Yield the evaluation after each round of a job."""
    spec = JobSpec.model_validate(document)
    assert spec.recipe is not None
    assert spec.federated is not None
    workload = RECIPES[spec.recipe].build(spec, DataPolicy.open())
    calendar = Calendar.of_rounds(spec.federated.rounds, 1, spec.checkpoint)
    given = StrategyContext(spec, workload, CPU, calendar, HeartbeatPage(None), "")
    strategy = strategy_of(given)
    strategy.join_group(0, 1)
    evaluation = evaluation_of(given, strategy)
    evaluation.take(strategy.data_part(), 1)
    feed = strategy.feed(on_device(workload.train, CPU))
    strategy.prepare(feed, 0)
    for number in range(1, spec.federated.rounds + 1):
        strategy.gradients.backward(Pass(feed.at(number).shares))
        strategy.update.step(spec.train.optimizer.lr)
        strategy.after_step(number)
        yield evaluation.measure(number)
