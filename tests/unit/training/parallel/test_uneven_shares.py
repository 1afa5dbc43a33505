"""If each rank makes its own steps, shares of different sizes are weighted by their samples."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from dray.spec import Train
from ray_workers.training.data.prefetcher import Share
from ray_workers.training.data.sampler import DistributedBatchSampler
from ray_workers.training.devices import CPU
from ray_workers.training.parallel.data_parallel.local_sgd import LocalGradientEngine
from ray_workers.training.parallel.gradients import EngineParts, Pass
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep

LR = 0.1
INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(12, 1, generator=torch.Generator().manual_seed(1))


def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def step_of_rank(
    rank: int, num_ranks: int, num_samples: int, **optimizer: float
) -> tuple[nn.Module, float]:
    """Return the model of a rank after its first step, whose global batch has this number of
    samples, and its loss."""
    model = linear()
    engine = LocalGradientEngine(EngineParts(model, loss_sum, nullcontext))
    engine._world_size = num_ranks  # `form` would make them meet
    options = Train.model_validate({"optimizer": {"name": "sgd", "lr": LR, **optimizer}})
    update = OptimizerStep(model, engine, options, CPU)
    shares = {"shares": [rank], "num_shares": num_ranks, "seed": 0}
    batches = DistributedBatchSampler(num_samples, samples_per_step=num_samples, **shares)  # type: ignore[arg-type]
    (batch,) = batches.at(1, 1)
    pieces = [(INPUTS[batch.indices], TARGETS[batch.indices])]
    engine.backward(Pass([Share(batch, pieces)]))
    loss = engine.take_loss()
    update.step(LR)
    return model, loss.item()


@pytest.mark.parametrize(("num_ranks", "num_samples"), [(5, 2), (5, 12), (4, 8), (3, 10)])
def test_the_mean_of_the_ranks_moves_by_the_gradient_of_the_batch(
    num_ranks: int, num_samples: int
) -> None:
    """Two samples on five ranks change it by lr (g1 + g2) / 2."""
    found = [step_of_rank(rank, num_ranks, num_samples) for rank in range(num_ranks)]
    model = linear()
    (loss_sum(model(INPUTS[:num_samples]), TARGETS[:num_samples]) / num_samples).backward()
    for index, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        mean = torch.stack([list(one.parameters())[index] for one, _ in found]).mean(dim=0)
        torch.testing.assert_close(mean, parameter - LR * parameter.grad)


def test_a_rank_without_samples_takes_no_step() -> None:
    """Weight decay and momentum would change its weights."""
    begun = linear()
    found = [step_of_rank(r, 5, 2, momentum=0.9, weight_decay=0.5)[0] for r in range(5)]
    still = [
        all(torch.equal(p, p0) for p, p0 in zip(one.parameters(), begun.parameters(), strict=True))
        for one in found
    ]
    assert sorted(still) == [False, False, True, True, True]


def test_the_loss_of_a_rank_is_the_mean_over_its_own_samples() -> None:
    model = linear()
    for rank in range(3):
        _, loss = step_of_rank(rank, 3, 10)
        start, stop = rank * 10 // 3, (rank + 1) * 10 // 3
        shares = {"shares": [rank], "num_shares": 3, "seed": 0}
        (batch,) = DistributedBatchSampler(10, samples_per_step=10, **shares).at(1, 1)  # type: ignore[arg-type]
        assert len(batch.indices) in (stop - start, stop - start + 1, stop - start - 1)
        own = loss_sum(model(INPUTS[batch.indices]), TARGETS[batch.indices]) / len(batch.indices)
        assert loss == pytest.approx(own.item(), rel=1e-5)
