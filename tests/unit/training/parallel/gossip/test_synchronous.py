"""D-PSGD and SGP compared with their matrix form: all copies as the rows of one matrix, in plain
tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.data.sampler import DistributedBatchSampler
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import soak
from tests.unit.training.jobs import document, series, weights
from tests.unit.training.ranks import checkpoint_refs, run_ranks

LR, MOMENTUM = 0.05, 0.9
STEPS = 16
"""Two epochs, each followed by a checkpoint."""


def job(world_size: int, sync: dict[str, Any], **train: Any) -> dict[str, Any]:
    sgd = {"name": "sgd", "lr": LR, "momentum": MOMENTUM}
    options: dict[str, Any] = {"optimizer": sgd, "schedule": {"name": "constant"}, "epochs": 2}
    # With this seed, no sample is at the threshold of a ReLU, where rounding would matter.
    options |= {"seed": 1} | train
    return document(world_size, **options) | {"sync": {"kind": "gossip", **sync}}


class MatrixForm:
    """Computes the ranks' gradients for the rows of a matrix, and has the names of its columns."""

    def __init__(self, spec: dict[str, Any], world_size: int) -> None:
        asked = JobSpec.model_validate(spec)
        self.workload = RECIPES["image_classification"].build(asked, DataPolicy.open())
        materialise(self.workload.model, torch.device("cpu"), asked.train.seed)
        self.shapes = {name: p.shape for name, p in self.workload.model.named_parameters()}
        self.world_size, self.asked = world_size, asked
        parts = [p.detach().flatten() for p in self.workload.model.parameters()]
        self.first = torch.cat(parts).repeat(world_size, 1)

    def gradients(self, rows: Tensor, step: int) -> Tensor:
        return torch.stack([self.gradient(rows[rank], rank, step) for rank in range(len(rows))])

    def gradient(self, row: Tensor, share: int, step: int) -> Tensor:
        samples, train = self.workload.train, self.asked.train
        batches = DistributedBatchSampler(
            len(samples),
            samples_per_step=train.global_batch_size,
            seed=train.seed,
            shares=[share],
            num_shares=self.world_size,
        )
        batch = batches.at(step, step)[0]
        inputs, targets = samples.fetch(samples.rows[batch.indices.numpy()])
        row = row.clone().requires_grad_()
        outputs = functional_call(self.workload.model, self.named(row), inputs)
        # Weighted by samples, so that the mean over all ranks is the mean over the batch.
        loss = self.workload.loss_sum(outputs, targets) * self.world_size / batch.num_global
        loss.backward()
        assert row.grad is not None
        return row.grad

    def named(self, row: Tensor) -> dict[str, Tensor]:
        parts = torch.split(row, [shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }


def shift(world_size: int, by: int) -> Tensor:
    """Return the matrix that gives each rank the copy from `by` ranks before it."""
    return torch.eye(world_size).roll(by, dims=0)


def ring(world_size: int) -> Callable[[int], Tensor]:
    one = torch.eye(world_size)
    if world_size == 2:
        return lambda step: (one + shift(2, 1)) / 2
    return lambda step: (one + shift(world_size, 1) + shift(world_size, -1)) / 3


def exponential(world_size: int) -> Callable[[int], Tensor]:
    turns = (world_size - 1).bit_length()
    return lambda step: (torch.eye(world_size) + shift(world_size, 2 ** ((step - 1) % turns))) / 2


LOLLIPOP = [[0, 1], [1, 2], [2, 0], [2, 3]]


def lollipop(step: int) -> Tensor:
    """Return the Metropolis weights of a triangle with a tail."""
    third, quarter = 1 / 3, 1 / 4
    return torch.tensor(
        [
            [1 - third - quarter, third, quarter, 0],
            [third, 1 - third - quarter, quarter, 0],
            [quarter, quarter, quarter, quarter],
            [0, 0, quarter, 1 - quarter],
        ]
    )


THREE = [[0, 1], [0, 2], [1, 2], [2, 0]]


def three(step: int) -> Tensor:
    """Return the matrix in which rank 0 divides its copy into three parts, and the others into
    two."""
    a, b = 1 / 3, 1 / 2
    return torch.tensor([[a, 0, b], [a, b, 0], [a, b, b]])


UNEVEN = [[0, 1], [0, 2], [1, 2], [2, 3], [3, 0], [2, 0]]


def uneven(step: int) -> Tensor:
    """Return the matrix in which ranks 0 and 2 divide their copies into three parts, and ranks 1
    and 3 into two."""
    a, b = 1 / 3, 1 / 2
    return torch.tensor([[a, 0, a, b], [a, b, 0, 0], [a, b, a, 0], [0, 0, a, b]])


def copies(home: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return (the copies of all ranks, the model) in the last checkpoint."""
    state = checkpoint_files.load(checkpoint_refs(home)[0]).state
    return state["gossip"]["copies"], state["model"]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sync", "world_size", "mixed_by"),
    [
        ({"graph": "ring"}, 4, ring(4)),
        soak({"graph": "exponential"}, 4, exponential(4)),
        soak({"graph": "custom", "edges": LOLLIPOP}, 4, lollipop),
        soak({"graph": "complete"}, 3, lambda step: torch.full((3, 3), 1 / 3)),
        soak({"graph": "ring"}, 2, ring(2)),
    ],
    ids=["ring-4", "exponential-4", "custom-4", "complete-3", "ring-2"],
)
def test_d_psgd_is_its_matrix_form(
    tmp_path: Path, sync: dict[str, Any], world_size: int, mixed_by: Callable[[int], Tensor]
) -> None:
    spec = job(world_size, sync)
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    form = MatrixForm(spec, world_size)
    rows, velocity = form.first, torch.zeros_like(form.first)
    for step in range(1, STEPS + 1):
        velocity = MOMENTUM * velocity + form.gradients(rows, step)
        rows = mixed_by(step) @ rows - LR * velocity
    found, model = copies(tmp_path)
    for copy, row in zip(found, rows, strict=True):
        assert_close(copy["model"], form.named(row))
    assert_close(model, form.named(rows.mean(dim=0)))
    assert_close(weights(tmp_path), form.named(rows.mean(dim=0)))
    distance = (rows - rows.mean(dim=0)).norm(dim=1).square().mean().sqrt().item()
    told = series(tmp_path, "train/consensus_distance")
    assert set(told) == {8, 16}
    assert told[16] == pytest.approx(distance, rel=1e-4)
    assert distance > 0.001


@pytest.mark.parametrize(
    ("sync", "world_size", "mixed_by"),
    [
        ({"graph": "custom", "edges": THREE}, 3, three),
        soak({"graph": "custom", "edges": UNEVEN}, 4, uneven),
        soak({"graph": "exponential"}, 4, exponential(4)),
        soak({"graph": "ring"}, 3, lambda step: (torch.eye(3) + shift(3, 1)) / 2),
    ],
    ids=["custom-3", "custom-4", "exponential-4", "ring-3"],
)
def test_sgp_is_its_matrix_form_with_push_weights(
    tmp_path: Path, sync: dict[str, Any], world_size: int, mixed_by: Callable[[int], Tensor]
) -> None:
    spec = job(world_size, {"mode": "sgp", **sync})
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    form = MatrixForm(spec, world_size)
    rows, pushed = form.first, torch.ones(world_size, 1)
    velocity = torch.zeros_like(rows)
    for step in range(1, STEPS + 1):
        rows, pushed = mixed_by(step) @ rows, mixed_by(step) @ pushed
        velocity = MOMENTUM * velocity + form.gradients(rows / pushed, step)
        rows = rows - LR * velocity
    found, model = copies(tmp_path)
    for copy, row, push_weight in zip(found, rows, pushed, strict=True):
        assert copy["push_weight"] == pytest.approx(push_weight.item(), abs=1e-6)
        assert_close(copy["model"], form.named(row / push_weight))
    mean = form.named(rows.sum(dim=0) / world_size)
    assert_close(model, mean)
    assert_close(weights(tmp_path), mean)
