"""The server's state goes into a checkpoint and comes back, whatever it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.devices import CPU
from ray_workers.training.parallel import Strategy, StrategyContext, strategy_of

PRIVACY = {"noise_multiplier": 0.9, "epsilon": 1e5, "delta": 1e-3, "adaptive": {}}


class Server:
    """A job of 40 clients in this process."""

    def __init__(self, **federated: Any) -> None:
        document = {
            "recipe": "tabular_classification",
            "data": {"source": "sklearn://wine"},
            "train": {"optimizer": {"name": "sgd", "lr": 0.1}, "ema": {"decay": 0.5}},
            "federated": {"clients": 40, "clients_per_round": 10, "rounds": 5, **federated},
        }
        spec = JobSpec.model_validate(document)
        workload = RECIPES["tabular_classification"].build(spec, DataPolicy.open())
        calendar = Calendar.of_rounds(5, 1, spec.checkpoint)
        given = StrategyContext(spec, workload, CPU, calendar, HeartbeatPage(None))
        self.strategy: Strategy = strategy_of(given)
        self.strategy.join_group(0, 1)
        self.feed = self.strategy.feed(on_device(workload.train, CPU))
        self.strategy.prepare(self.feed, 0)

    def play(self, number: int) -> None:
        shares = self.feed.at(number).shares
        self.strategy.gradients.backward(shares, None, lambda _: None, lambda: None)
        self.strategy.update.step(0.1)
        self.strategy.after_step(number)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.strategy.model.parameters()])


@pytest.mark.parametrize(
    "federated",
    [
        {"server": {"momentum": 0.9}},
        {"algorithm": "fedadam", "server": {"lr": 0.01}},
        {"algorithm": "fedyogi", "server": {"lr": 0.01}},
        {"algorithm": "scaffold"},
        {"privacy": PRIVACY},
    ],
    ids=["momentum", "fedadam", "fedyogi", "scaffold", "privacy"],
)
def test_a_server_goes_on_from_its_state(federated: dict[str, Any]) -> None:
    if "privacy" in federated:
        pytest.importorskip("opacus.accountants")
    one = Server(**federated)
    one.play(1)
    one.play(2)
    before, state = one.weights(), copy.deepcopy(one.strategy.state())
    one.play(3)
    assert not torch.equal(one.weights(), before)
    other = Server(**federated)
    other.strategy.load(state)
    assert torch.equal(other.weights(), before)
    other.play(3)
    assert torch.equal(other.weights(), one.weights())


def test_a_round_that_breaks_off_leaves_no_trace() -> None:
    undisturbed, other = Server(algorithm="scaffold"), Server(algorithm="scaffold")
    for number in (1, 2):
        undisturbed.play(number)
    other.play(1)
    shares = other.feed.at(2).shares
    other.strategy.gradients.backward(shares, None, lambda _: None, lambda: None)
    other.strategy.leave_group()
    other.strategy.join_group(0, 1)
    other.strategy.prepare(other.feed, 1)
    other.play(2)
    assert torch.equal(other.weights(), undisturbed.weights())
