"""The equations for steps of clients and of the server, compared with a few lines of torch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.client_training import ClientTraining
from ray_workers.training.parallel.gradients import EngineParts
from tests.unit.training.parallel.federated.in_process import Server
from tests.unit.training.ranks import run_in_group


def document(**federated: Any) -> dict[str, Any]:
    return {
        "recipe": "tabular_classification",
        "data": {"source": "sklearn://wine"},
        "train": {"optimizer": {"name": "sgd", "lr": 0.1}, "max_grad_norm": 0.5},
        "federated": {"clients": 4, "clients_per_round": 4, "rounds": 5, **federated},
    }


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def test_fedprox_clips_the_gradient_of_the_proximal_objective() -> None:
    """The gradient of the whole objective, loss + mu / 2 |w - w0|^2, is clipped."""
    spec = JobSpec.model_validate(document(algorithm="fedprox", proximal_mu=20.0))
    assert spec.federated is not None
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batches = [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(4)]
    parts = EngineParts(model, squares, nullcontext)
    training = ClientTraining(parts, spec.train, spec.federated)
    update, _ = training.train(batches, 0.1, None)
    own = copy.deepcopy(model)
    begun = [p.detach().clone() for p in model.parameters()]
    clipped = 0
    for inputs, targets in batches:
        own.zero_grad()
        loss = squares(own(inputs), targets) / len(inputs)
        pull = sum((p - p0).square().sum() for p, p0 in zip(own.parameters(), begun, strict=True))
        (loss + 20.0 / 2 * pull).backward()
        clipped += float(nn.utils.clip_grad_norm_(own.parameters(), 0.5)) > 0.5
        with torch.no_grad():
            for p in own.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
    assert clipped >= 3, "or nothing was shown"
    wanted = [p.detach() - p0 for p, p0 in zip(own.parameters(), begun, strict=True)]
    torch.testing.assert_close(update, torch.cat([w.flatten() for w in wanted]))


def with_batchnorm(**federated: Any) -> Server:
    """Return a job whose model contains BatchNorm, as an imported model might."""
    server = Server(document(**federated), lambda model: nn.Sequential(model, nn.BatchNorm1d(3)))
    with torch.no_grad():
        server.buffers()["1.running_var"].fill_(2.0)
    return server


@pytest.mark.parametrize(
    ("server", "rate"),
    [
        ({"lr": 0.25}, 0.25),
        ({"lr": 1.0}, 1.0),
        ({"lr": 4.0}, 1.0),
        ({"lr": 0.5, "momentum": 0.9}, 0.5),
    ],
)
def test_running_statistics_move_by_the_servers_rate(server: dict[str, Any], rate: float) -> None:
    """They change by a fraction of the change in the clients' mean, weighted by samples."""
    whole, part = with_batchnorm(), with_batchnorm(server=server)
    begun = {name: each.clone() for name, each in whole.buffers().items()}
    whole.play(1)
    part.play(1)
    for name in ("1.running_mean", "1.running_var"):
        wanted = begun[name] + rate * (whole.buffers()[name] - begun[name])
        torch.testing.assert_close(part.buffers()[name], wanted)
        assert not torch.equal(whole.buffers()[name], begun[name])


def test_an_adaptive_servers_rate_is_no_share_of_the_update() -> None:
    whole, adaptive = with_batchnorm(), with_batchnorm(algorithm="fedadam", server={"lr": 0.01})
    whole.play(1)
    adaptive.play(1)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(adaptive.buffers()[name], whole.buffers()[name])


class Counting(nn.Module):
    """Counts the samples with which it was trained."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs) * torch.tensor([1, 10])
        return inputs


def test_integer_buffers_are_those_of_the_client_with_the_most_samples() -> None:
    run_in_group(_play_with_counters, 2)
    _play_with_counters(0, num_ranks=1)


def _play_with_counters(rank: int, num_ranks: int = 2) -> None:
    options = {"partition": {"by": "dirichlet", "alpha": 0.5}, "local_epochs": 2}
    server = Server(
        document(**options),
        lambda model: nn.Sequential(model, Counting()),
        *(rank, num_ranks),
    )
    total = 0
    for number in (1, 2):
        (mine,) = server.feed.at(number).shares
        assert isinstance(mine, RoundShare)
        sizes = [one.num_samples for one in mine.plan.participants]
        assert sizes.count(max(sizes)) == 1, "or nothing was shown"
        total += 2 * max(sizes)
        server.play(number)
        assert server.buffers()["1.seen"].tolist() == [total, 10 * total]
