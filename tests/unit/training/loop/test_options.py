"""The ranks apply the document's options for gradients and learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ray_workers.training.checkpoint import checkpoint_files
from tests.marks import ONE_SET
from tests.unit.training.jobs import digits, document, series, weights
from tests.unit.training.ranks import checkpoint_refs, run_ranks

PLAIN_SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0}


def gradients() -> dict[str, Tensor]:
    """Return the gradient of the mean loss over all training samples at the initial weights."""
    work = digits()
    inputs, labels = work.train.take(torch.arange(len(work.train)))
    F.cross_entropy(work.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    found = {name: part.grad for name, part in work.model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@ONE_SET
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("max_norm", [0.02, 1.0])
def test_a_gradient_longer_than_the_limit_is_shortened_to_it(
    tmp_path: Path, max_norm: float, world_size: int
) -> None:
    """One step of plain SGD on the whole data set: the weights minus the learning rate times the
    gradient."""
    expected = gradients()
    norm = float(torch.sqrt(sum(g.square().sum() for g in expected.values())))
    assert 0.04 < norm < 1.0
    shortened = min(1.0, max_norm / norm)
    options = {"global_batch_size": len(digits().train), "max_steps": 1, "optimizer": PLAIN_SGD}
    spec = document(world_size, **options, schedule={}, max_grad_norm=max_norm)
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0] * world_size
    assert series(tmp_path, "train/grad_norm")[1] == pytest.approx(norm, rel=1e-4)
    before, after = digits().model.state_dict(), weights(tmp_path)
    for name, gradient in expected.items():
        moved = after[name] - before[name]
        torch.testing.assert_close(moved, -0.5 * shortened * gradient, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "scaling", "expected"),
    [
        ({"warmup_steps": 4}, None, [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]),
        (
            {"name": "linear", "warmup_steps": 2, "final_ratio": 0.5},
            "linear",
            [0.02, 0.04, 0.04, 0.035, 0.03, 0.025],
        ),
        (
            {"name": "cosine", "warmup_steps": 2},
            "sqrt",
            [0.01, 0.02, 0.02, 0.017071068, 0.01, 0.002928932],
        ),
        (
            {"name": "step", "warmup_steps": 1, "every_steps": 2, "factor": 0.5},
            "sqrt",
            [0.02, 0.02, 0.02, 0.01, 0.01, 0.005],
        ),
    ],
    ids=["constant", "linear", "cosine", "step"],
)
def test_the_rate_warms_up_grows_with_the_batch_and_falls_as_the_document_says(
    tmp_path: Path, schedule: dict[str, Any], scaling: str | None, expected: list[float]
) -> None:
    """A learning rate of 0.01 (for 50 samples, if scaled) on batches of 200 samples, for 6
    steps."""
    options: dict[str, Any] = {"optimizer": {"lr": 0.01}, "max_steps": 6, "schedule": schedule}
    if scaling is not None:
        options["lr_scaling"] = {"rule": scaling, "reference_batch_size": 50}
    assert run_ranks(tmp_path, document(2, **options), world_size=2) == [0, 0]
    told = series(tmp_path, "train/lr")
    assert told == pytest.approx(dict(enumerate(expected, start=1)), rel=1e-6)
    groups = checkpoint_files.load(checkpoint_refs(tmp_path)[0]).state["optimizer"]["param_groups"]
    assert {group["lr"] for group in groups} == {told[6]}
