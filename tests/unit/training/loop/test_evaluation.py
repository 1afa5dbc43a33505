"""Metrics do not depend on the number of ranks that measure them, or on how samples are divided."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from dray import spec
from ray_workers.recipes import measures
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import Samples
from ray_workers.training.loop.evaluation import Evaluation
from ray_workers.training.parallel import DataPart, Strategy
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.jobs import series
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import run_in_group, run_ranks

SIZES = (1, 3, 9)
"""Number of samples in a validation split."""
GENERATOR = torch.Generator().manual_seed(0)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


LABELS = torch.tensor([0, 2, 1, 2, 0, 4] * 3)
MASKS = torch.randint(0, 3, (18, 4, 4), generator=GENERATOR)
TOKENS = torch.randint(0, 6, (18, 8), generator=GENERATOR)
ENTROPY = measures.cross_entropy(0.0)
KINDS: dict[str, tuple[Tensor, Tensor, Any, Any]] = {
    "classes": (
        _randn(18, 5),
        LABELS,
        lambda: measures.of_classes(5, 18),
        ENTROPY,
    ),
    "many classes": (
        *(_randn(18, 5), LABELS, lambda: measures.of_classes(5, 10**9)),
        ENTROPY,
    ),
    "numbers": (
        *(_randn(18), _randn(18), measures.of_numbers),
        lambda outputs, targets: (outputs - targets).square().sum(),
    ),
    "pixels": (
        *(_randn(18, 3, 4, 4), MASKS, lambda: measures.of_pixels(3)),
        measures.cross_entropy_and_dice,
    ),
    "tokens": (
        *(_randn(18, 8, 6), TOKENS, measures.of_tokens),
        lambda logits, ids: ENTROPY(logits.flatten(0, 1), ids.flatten()) / 8,
    ),
}
"""(outputs, targets, metrics, sum of the losses) for each kind of recipe."""


class Given:
    """A strategy whose model returns its inputs and counts its calls."""

    def __init__(self) -> None:
        self.num_batches = self.num_moves = 0

    def judging(self) -> Any:
        return nullcontext()

    def narrowed(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return samples

    def move(self) -> None:
        self.num_moves += 1

    def predict(self, inputs: Tensor) -> Tensor:
        self.num_batches += 1
        return inputs


def evaluation(kind: str, size: int, micro_batch_size: int | None) -> tuple[Evaluation, Given]:
    outputs, targets, metrics, loss_sum = KINDS[kind]
    rows = torch.arange(size).numpy()
    samples = Samples(rows, lambda at: (outputs[at], targets[at]))
    workload = Workload(
        model=nn.Identity(),
        train=samples,
        validation=samples,
        loss_sum=loss_sum,
        validation_loss_sum=loss_sum,
        metrics=metrics,
        fingerprint="",
        write_results=lambda *_: None,
    )
    options = spec.Train(global_batch_size=24, micro_batch_size=micro_batch_size)
    strategy = Given()
    device = torch.device("cpu")
    parts = (workload, device, cast(Strategy, strategy), nullcontext, options)
    return Evaluation(*parts, moved=strategy.move), strategy


CASES = list(itertools.product(KINDS, SIZES, (None, 2)))
"""(kind, samples, micro-batch size)."""


def at_once() -> list[dict[str, float]]:
    """Return the metrics of each case, measured by one process over all samples."""
    found = []
    for kind, size, _ in CASES:
        outputs, targets, metrics, loss_sum = KINDS[kind]
        whole: MetricCollection = metrics()
        whole.update(outputs[:size], targets[:size])
        values = {f"val/{name}": float(value) for name, value in whole.compute().items()}
        found.append(values | {"val/loss": float(loss_sum(outputs[:size], targets[:size])) / size})
    return found


def _measure_all(rank: int, world_size: int, expected: list[dict[str, float]]) -> None:
    for case, values in zip(CASES, expected, strict=True):
        kind, size, micro_batch_size = case
        measured, strategy = evaluation(kind, size, micro_batch_size)
        measured.take(DataPart(range(rank, rank + 1), world_size), world_size)
        assert measured.measure(1) == pytest.approx(values, rel=1e-5, nan_ok=True), case
        batches = -(-size // world_size) / (micro_batch_size or -(-24 // world_size))
        assert strategy.num_batches == math.ceil(batches), "all compute equally often"
        assert strategy.num_moves == strategy.num_batches


@pytest.mark.parametrize("world_size", [2, soak(8)])
def test_any_number_of_ranks_measures_any_split(world_size: int) -> None:
    run_in_group(_measure_all, world_size, world_size, at_once())


@SOAK
def test_so_does_one_alone() -> None:
    _measure_all(0, 1, at_once())


@ONE_SET
@pytest.mark.parametrize("fraction", [0.02, 0.2], ids=["one of each class", "uneven"])
def test_a_small_table_is_classified_by_ranks_of_which_some_have_nothing_to_judge(
    fraction: float, tmp_path: Path
) -> None:
    document = {
        "recipe": "tabular_classification",
        "data": {"source": "sklearn://iris", "validation_fraction": fraction},
        "train": {"epochs": 2, "global_batch_size": 28},
        "resources": {"num_workers": 4},
    }
    assert run_ranks(tmp_path, document, world_size=4) == [0] * 4
    assert set(series(tmp_path, "val/auroc")) == set(series(tmp_path, "val/loss"))
    assert all(0.0 <= value <= 1.0 for value in series(tmp_path, "val/auroc").values())


@ONE_SET
@pytest.mark.parametrize("parallel", [{"shard": 2}, {"pipeline": 2}], ids=str)
def test_one_sample_judges_a_divided_model(parallel: dict[str, int], tmp_path: Path) -> None:
    """One of the ranks that share the model has no sample to evaluate."""
    homes = [tmp_path / "divided", tmp_path / "alone"]
    for home, num_ranks, division in zip(homes, (2, 1), (parallel, {}), strict=True):
        home.mkdir()
        spec = brief(home, num_ranks, division, max_steps=2)
        spec["data"]["validation_fraction"] = 1 / 176  # of the same number of windows
        assert run_ranks(home, spec, world_size=num_ranks) == [0] * num_ranks
    for key in ("val/loss", "val/accuracy", "val/perplexity"):
        found, expected = (series(home, key) for home in homes)
        assert found == pytest.approx(expected, rel=1e-5), key


def test_one_sample_judges_a_regression_but_for_what_is_not_defined_of_it(tmp_path: Path) -> None:
    document = {
        "recipe": "tabular_regression",
        "data": {"source": "sklearn://diabetes", "validation_fraction": 0.002},
        "train": {"max_steps": 2, "global_batch_size": 200},
        "resources": {"num_workers": 2},
    }
    assert run_ranks(tmp_path, document, world_size=2) == [0, 0]
    (error,), (r2,) = (series(tmp_path, f"val/{name}").values() for name in ("mae", "r2"))
    assert error > 0.0
    assert math.isnan(r2)
    left = json.loads((tmp_path / "attempt-1" / "artifacts" / "metrics.json").read_text())
    assert left["val/mae"] == error
    assert left["val/r2"] is None
