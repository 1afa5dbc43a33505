"""Federated jobs on real ranks: the algorithms by their equations, and the faults of a round."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training import devices
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.parallel.federated.client_batches import ClientFeed
from ray_workers.training.parallel.federated.partition import divide
from ray_workers.training.parallel.federated.rounds import RoundPlan, Rounds
from ray_workers.training.parallel.meta_init import materialise
from tests.unit.training.jobs import series, weights
from tests.unit.training.ranks import run_ranks

LR = 0.1
ROUNDS = 4


def job(
    num_workers: int, train: dict[str, Any] | None = None, **federated: Any
) -> dict[str, Any]:
    """Some clients of digits with unlike data, of which some drop out and some straggle."""
    return {
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 16},
        "train": {"optimizer": {"name": "sgd", "lr": LR}, "seed": 1, **(train or {})},
        "resources": {"num_workers": num_workers},
        "federated": {
            "clients": 24,
            "clients_per_round": 8,
            "rounds": ROUNDS,
            "local_epochs": 2,
            "batch_size": 16,
            "partition": {"by": "dirichlet", "alpha": 0.3},
            "dropout_rate": 0.2,
            "stragglers": {"rate": 0.3},
            **federated,
        },
    }


class Reference:
    """All clients one after the other in plain tensor code."""

    def __init__(self, document: dict[str, Any]) -> None:
        spec = JobSpec.model_validate(document)
        assert spec.federated is not None
        self.options, seed = spec.federated, spec.train.seed
        work = RECIPES["image_classification"].build(spec, DataPolicy.open())
        self.work: Workload = work
        self.model = work.model
        materialise(self.model, devices.CPU, seed)
        clients = divide(self.options.partition, 24, work.train, work.validation, seed).train
        self.rounds = Rounds(self.options, [len(one) for one in clients], seed)
        samples = on_device(work.train, devices.CPU)
        self.feed = ClientFeed(samples, clients, self.rounds, 16, seed, 1)
        zeros = [torch.zeros_like(p) for p in self.model.parameters()]
        self.mean = [zero.clone() for zero in zeros]
        self.variance = [torch.full_like(zero, 1e-6) for zero in zeros]
        self.control = zeros
        self.controls = [[zero.clone() for zero in zeros] for _ in range(24)]

    def play(self) -> nn.Module:
        for number in range(1, ROUNDS + 1):
            with torch.no_grad():
                before = [p.clone() for p in self.model.parameters()]
            plan = self.rounds.plan(number)
            trained = [self._train(plan, at) for at in range(len(plan.participants))]
            with torch.no_grad():
                self._serve(plan, before, trained)
        return self.model

    def _train(self, plan: RoundPlan, place: int) -> list[Tensor]:
        """The weights of a client after its steps."""
        one = plan.participants[place]
        client = copy.deepcopy(self.model)
        for inputs, targets in self.feed.batches(plan.number, one):
            client.zero_grad()
            loss = self.work.loss_sum(client(inputs), targets) / len(targets)
            if self.options.algorithm == "fedprox":
                pairs = zip(client.parameters(), self.model.parameters(), strict=True)
                distance = sum((w - w0.detach()).square().sum() for w, w0 in pairs)
                loss = loss + 0.3 / 2 * distance
            loss.backward()
            with torch.no_grad():
                own = self.controls[one.client]
                for w, c, c_i in zip(client.parameters(), self.control, own, strict=True):
                    assert w.grad is not None
                    w -= LR * (w.grad - c_i + c)
        return [w.detach() for w in client.parameters()]

    def _serve(self, plan: RoundPlan, before: list[Tensor], trained: list[list[Tensor]]) -> None:
        sizes = [one.num_samples for one in plan.participants]
        if self.options.algorithm == "scaffold":
            sizes = [1 for _ in sizes]
        changes = [
            sum(n * (own[at] - w) for n, own in zip(sizes, trained, strict=True)) / sum(sizes)
            for at, w in enumerate(before)
        ]
        for at, w in enumerate(self.model.parameters()):
            w += self._step(at, changes[at])
        if self.options.algorithm == "scaffold":
            for one, own in zip(plan.participants, trained, strict=True):
                for at, w in enumerate(before):
                    c_i, steps = self.controls[one.client][at], one.num_steps
                    new = c_i - self.control[at] + (w - own[at]) / (steps * LR)
                    self.controls[one.client][at] = new
            for at in range(len(before)):
                self.control[at] = sum(own[at] for own in self.controls) / 24  # type: ignore[assignment]

    def _step(self, at: int, change: Tensor) -> Tensor:
        if self.options.algorithm not in ("fedadam", "fedyogi"):
            return change
        m, v = self.mean[at], self.variance[at]
        m.mul_(0.9).add_(0.1 * change)
        if self.options.algorithm == "fedadam":
            v.copy_(0.99 * v + 0.01 * change**2)
        else:
            v.copy_(v - 0.01 * change**2 * torch.sign(v - change**2))
        return 0.03 * m / (v.sqrt() + 1e-3)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"proximal_mu": 0.3},
    "scaffold": {},
    "fedadam": {"server": {"lr": 0.03}},
    "fedyogi": {"server": {"lr": 0.03}},
}


@pytest.mark.parametrize(("algorithm", "world_size"), zip(ALGORITHMS, [2, 1, 2, 1, 2]))
def test_the_equations_hold(tmp_path: Path, algorithm: str, world_size: int) -> None:
    spec = job(world_size, algorithm=algorithm, **ALGORITHMS[algorithm])
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    found = weights(tmp_path)
    reference = Reference(spec)
    begun = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    for name, expected in reference.play().state_dict().items():
        assert not torch.allclose(begun[name], expected, atol=1e-3), "nothing was learned"
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)
