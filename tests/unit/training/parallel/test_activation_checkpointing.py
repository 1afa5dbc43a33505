"""Recomputation saves memory without changing any values, and compilation only changes rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from dray import spec
from ray_workers.recipes.models.gpt import Gpt
from ray_workers.shared.contracts import RankTask
from ray_workers.training.parallel.activation_checkpointing import prepare_blocks
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK, soak
from tests.unit.training.jobs import assert_same, weights
from tests.unit.training.parallel.test_model_parallel import EQUAL, brief, furthest, images, text
from tests.unit.training.ranks import run_ranks

CPU = torch.device("cpu")


def with_dropout(folder: Path, num_workers: int, parallel: dict[str, Any], **train: Any) -> Any:
    document = text(folder, num_workers, parallel, max_steps=6, **train)
    return document | {"model": {**document["model"], "dropout": 0.1}}


@pytest.mark.parametrize(
    ("parallel", "how"),
    [
        soak({}, "selective"),
        soak({"tensor": 2}, "selective"),
        ({"shard": 2}, "full"),
        soak({"pipeline": 2}, "full"),
        soak({"context": 2}, "full"),
    ],
    ids=["data", "tensor", "shard", "pipeline", "context"],
)
def test_what_is_computed_again_is_the_same(
    tmp_path: Path, parallel: dict[str, Any], how: str
) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    assert run_ranks(kept, with_dropout(tmp_path, 2, parallel), world_size=2) == [0, 0]
    document = with_dropout(tmp_path, 2, parallel, recompute=how)
    assert run_ranks(again, document, world_size=2) == [0, 0]
    assert_same(weights(again), weights(kept))


@SOAK
def test_the_more_is_computed_again_the_less_is_kept() -> None:
    peaks = [_peak_bytes(spec.Train(recompute=how)) for how in ("none", "selective", "full")]
    none, selective, full = peaks
    assert selective < 0.8 * none
    assert full < 0.8 * selective


def _peak_bytes(options: spec.Train) -> int:
    """Return the peak memory of a forward and backward pass in addition to the weights, as measured
    by torch."""
    shape = spec.Gpt(num_layers=8, num_heads=4, width=64, context_length=128)
    with torch.device("meta"):
        model = Gpt(shape, 256)
    materialise(model, CPU, 0)
    prepare_blocks(model, options)
    ids = torch.zeros(4, 128, dtype=torch.int64)
    tracker = MemTracker()
    with tracker:
        model(ids).sum().backward()
    peak: int = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    return peak


@SOAK  # compiling takes half a minute
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    assert run_ranks(plain, images(2, {}), world_size=2) == [0, 0]
    assert run_ranks(compiled, images(2, {}, compile=True), world_size=2) == [0, 0]
    assert furthest(compiled, plain) < EQUAL


@SOAK
@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [({"shard": 2}, "full"), soak({"pipeline": 2}, "selective"), soak({"context": 2}, "none")],
    ids=["shard", "pipeline", "context"],
)
def test_compiled_blocks_learn_the_same_however_they_are_divided(
    parallel: dict[str, Any], recompute: str, tmp_path: Path
) -> None:
    """The last stage of the compiler is excluded, because it is slow and independent of ranks."""
    alone, divided = tmp_path / "alone", tmp_path / "divided"
    for home in (alone, divided):
        home.mkdir()
    assert run_ranks(alone, brief(alone, 1, {}), world_size=1) == [0]
    job = brief(divided, 2, parallel, compile=True, recompute=recompute)
    assert run_ranks(divided, job, world_size=2, before=_capture_alone) == [0, 0]
    assert furthest(divided, alone) < EQUAL


def _capture_alone(task: RankTask) -> None:
    whole = torch.nn.Module.compile

    def capture(self: torch.nn.Module) -> None:
        whole(self, backend="aot_eager")  # type: ignore[no-untyped-call]

    torch.nn.Module.compile = capture  # type: ignore[method-assign, assignment]
