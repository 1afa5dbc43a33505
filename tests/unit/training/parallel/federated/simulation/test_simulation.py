"""Federated jobs on real ranks: the algorithms compared with their equations, and faults in a
round."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training import devices
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.parallel.federated.rounds import RoundPlan, Rounds
from ray_workers.training.parallel.federated.simulation.client_feed import ClientFeed
from ray_workers.training.parallel.federated.simulation.partition import divide
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK
from tests.unit.training.jobs import assert_same, series, wait_for_checkpoint, weights
from tests.unit.training.parallel.federated.in_process import Server
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks

LR = 0.1
ROUNDS = 4


def job(num_workers: int, train: dict[str, Any] | None = None, **federated: Any) -> dict[str, Any]:
    """Return a job with clients that have different digits; some of them drop out and some are
    slow."""
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
    """All clients, one after another, in plain tensor code."""

    def __init__(self, document: dict[str, Any]) -> None:
        spec = JobSpec.model_validate(document)
        assert spec.federated is not None
        self.options, seed = spec.federated, spec.train.seed
        work = RECIPES["image_classification"].build(spec, DataPolicy.open())
        self.work: Workload = work
        self.model = work.model
        materialise(self.model, devices.CPU, seed)
        divided = divide(self.options.partition, 24, work.train, work.validation, seed)
        self.validation = [torch.from_numpy(numbers) for numbers in divided.validation]
        clients = divided.train
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

    def _train(self, plan: RoundPlan, index: int) -> list[Tensor]:
        """Return the weights of a client after its steps."""
        one = plan.participants[index]
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_equations_hold(algorithm: str) -> None:
    document = job(1, algorithm=algorithm, **ALGORITHMS[algorithm])
    server, reference = Server(document), Reference(document)
    begun = server.weights()
    for number in range(1, ROUNDS + 1):
        server.play(number)
    for name, expected in reference.play().state_dict().items():
        assert not torch.allclose(begun[name], expected, atol=1e-3), "nothing was learned"
        torch.testing.assert_close(server.weights()[name], expected, rtol=1e-5, atol=1e-5)


EVERYTHING: dict[str, Any] = {"algorithm": "scaffold", "evaluate_every": 2}
"""A job with all kinds of state, of the server and of each client."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("alone")
    assert run_ranks(home, job(1, **EVERYTHING), world_size=1) == [0]
    return home


@SOAK
def test_a_rank_that_dies_in_a_round_changes_nothing_and_nor_does_the_number_of_ranks(
    alone: Path, tmp_path: Path
) -> None:
    spec = job(3, **EVERYTHING)
    codes = run_ranks(tmp_path, spec, world_size=3, before=die_in_round_3, recovers=True)
    assert codes == [0, 0, 0]
    assert replaced(tmp_path) == [1]
    _assert_same_end(tmp_path, alone)
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/worst_tenth_accuracy"):
        assert series(tmp_path, key) == series(alone, key), key


def die_in_round_3(task: RankTask) -> None:
    if task.rank == 1 and task.incarnation == 0:
        arm(FaultPoint.BEFORE_EXCHANGE, lambda: os.kill(os.getpid(), signal.SIGKILL), at_step=3)


def test_a_job_resumes_between_rounds_on_fewer_ranks_equal_to_the_bit(
    alone: Path, tmp_path: Path
) -> None:
    spec = job(2, **EVERYTHING)
    codes = run_ranks(tmp_path, spec, world_size=2, before=die_after_round_3)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(tmp_path)
    assert [ref.step for ref in refs] == [2]
    spec = job(1, **EVERYTHING)
    assert run_ranks(tmp_path, spec, world_size=1, attempt=2, resume_from=refs) == [0]
    assert list(series(tmp_path, "train/loss", attempt=2)) == [3, 4]
    (resumed,) = frames(tmp_path, attempt=2, kind="resumed")
    assert resumed["position"] == {"epoch": 1, "step_in_epoch": 0, "samples": 0}
    _assert_same_end(tmp_path, alone, attempt=2)


def die_after_round_3(task: RankTask) -> None:
    def die() -> None:
        wait_for_checkpoint(task, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    arm(FaultPoint.STEP_ENDS, die, at_step=3)


def _assert_same_end(home: Path, other: Path, attempt: int = 1) -> None:
    """Compare the weights, and the states of the server and of every client."""
    one = checkpoint_files.load(checkpoint_refs(home, attempt=attempt)[0])
    two = checkpoint_files.load(checkpoint_refs(other)[0])
    assert one.saved.step == two.saved.step == ROUNDS
    assert "controls" in two.state["federated"]
    assert_same(one.state, two.state)


def test_each_round_reports_who_came_and_evaluation_is_by_client(alone: Path) -> None:
    rounds = Reference(job(1, **EVERYTHING)).rounds
    plans = [rounds.plan(number) for number in range(1, ROUNDS + 1)]
    assert list(series(alone, "federated/updates").values()) == [
        len(plan.participants) for plan in plans
    ]
    dropped = list(series(alone, "federated/dropped_out").values())
    assert dropped == [len(plan.lost) for plan in plans]
    assert sum(dropped) > 0
    assert list(series(alone, "val/loss")) == [2, 4]
    reference = Reference(job(1))
    reference.model.load_state_dict(weights(alone))
    clients = [numbers for numbers in reference.validation if len(numbers)]
    with torch.no_grad():
        inputs, targets = reference.work.validation.take(torch.cat(clients))
        right = (reference.model(inputs).argmax(dim=1) == targets).double()
    of_clients = [part.mean() for part in torch.split(right, [len(one) for one in clients])]
    worst = torch.stack(of_clients).sort().values[: -(-len(clients) // 10)].mean()
    assert series(alone, "val/worst_tenth_accuracy")[4] == pytest.approx(float(worst))
    assert series(alone, "val/accuracy")[4] == pytest.approx(float(right.mean()))
    assert worst < right.mean()


def test_a_private_job_ends_when_its_epsilon_is_spent(tmp_path: Path) -> None:
    pytest.importorskip("opacus.accountants")
    privacy = {"noise_multiplier": 0.3, "clip_norm": 0.5, "epsilon": 30.0, "delta": 1e-3}
    spec = job(2, rounds=50, evaluate_every=50, privacy={**privacy, "adaptive": {}})
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    spent = series(tmp_path, "federated/epsilon")
    assert 1 < len(spent) < 50
    assert list(spent.values()) == sorted(spent.values())
    assert list(spent.values())[-1] <= 30.0
    assert list(series(tmp_path, "val/loss")) == [len(spent)], "it is measured, and so complete"
    assert len(set(series(tmp_path, "federated/clip_norm").values())) == len(spent)
