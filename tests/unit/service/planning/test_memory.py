"""The memory computed by the planner is equal to the memory of the model and of a step in torch."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planner import rank as measuring
from benchmarks.planner.work import jobs
from dray import spec
from dray.spec import JobSpec
from ray_workers.recipes.models import images
from ray_workers.recipes.models.gpt import Gpt
from ray_workers.recipes.models.unet import Unet
from service.planning.model import gpt
from service.planning.model.choice import smallest_change
from service.planning.model.memory import Memory, elements_of, fits, memory_of, traces_of
from service.planning.model.memory_simulator import (
    Gradients,
    MemorySimulation,
    peak_bytes,
    saved_bytes,
)
from service.planning.model.meshes import meshes
from service.planning.model.shapes import Shapes, shapes_of
from tests.marks import ONE_SET, soak_but
from tests.unit.training.ranks import run_in_group

WITHIN = 0.15
TRIED = [
    "gpt",
    "gpt, bf16",
    "gpt, selective",
    "gpt, full",
    "gpt, micro-batches",
    "resnet",
    "cnn",
    "data 2",
    "data 2, top-k",
    "data 2, local SGD",
    "data 2, DiLoCo",
    "data 2, D-PSGD",
    "data 2, exact",
    "shard 2",
    "shard 2, ZeRO 2",
    "shard 2, ZeRO 1",
    "shard 2, ZeRO 1, lamb",
    "shard 2, ZeRO 1, one matrix",
    "shard 2, bf16 gathered",
    "wide gpt, bf16 state",
    "tensor 2",
    "context 2",
    "pipeline 2",
    "resnet, pipeline 2",
    "unet, bf16",
    "table",
    "data 2 x shard 2",
]
"""The divisions to test; `python -m benchmarks planner` tries all divisions."""
SHORT = {"data 2", "shard 2, ZeRO 1", "pipeline 2"}
"""The divisions tested by `make test`."""


def _measure(rank: int, num_ranks: int, document: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group exists already
    found = measuring.peak_bytes(document, rank, num_ranks, Path(folder))
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))


@ONE_SET
@pytest.mark.parametrize("name", soak_but(TRIED, short=SHORT))
def test_the_peak_is_what_torch_counts(tmp_path: Path, name: str) -> None:
    num_ranks, document = jobs(tmp_path)[name]
    job = JobSpec.model_validate(document)
    run_in_group(_measure, num_ranks, num_ranks, job.model_dump_json(), str(tmp_path))
    found = max(json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json"))
    assert memory_of(job, shapes_of(job)).total == pytest.approx(found, rel=WITHIN)


def test_copies_that_the_document_asks_for_are_counted(tmp_path: Path) -> None:
    """Two generations of the rank's share, and of each share that it keeps for others."""
    _, document = jobs(tmp_path)["shard 2"]
    shapes = shapes_of(JobSpec.model_validate(document))

    def planned(rule: Any) -> Memory:
        return memory_of(
            JobSpec.model_validate({**document, "checkpoint": {"in_memory": rule}}), shapes
        )

    without, auto = planned("off"), planned("auto")
    asked = planned({"every_steps": 9, "copies": 1})
    assert auto == without
    share = without.parameters + without.optimizer
    assert asked.total - without.total == pytest.approx(2 * 2 * share, abs=2)
    job = JobSpec.model_validate({**document, "checkpoint": {"in_memory": {"every_steps": 9}}})
    assert fits(job, shapes, asked.total)
    assert not fits(job, shapes, asked.total - 8)
    change = smallest_change(job, shapes, without.total, all_of_them=False)
    assert change is not None


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "how",
    [
        MemorySimulation(),
        MemorySimulation(gradients=Gradients.COPIED, adds_to_gradients=True),
        MemorySimulation(gradients=Gradients.SCATTERED, holders=4),
        MemorySimulation(gradients=Gradients.SCATTERED, holders=4, gathers_again=False),
        MemorySimulation(keeps_casts=True),
    ],
    ids=["kept", "copied", "sharded", "gathered once", "casts kept"],
)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("samples", [1, 30], ids=["weights", "activations"])
def test_layers_that_are_alike_are_played_once(
    monkeypatch: pytest.MonkeyPatch, how: MemorySimulation, recompute: str, half: bool, samples: int
) -> None:
    """The result is exactly the same as for all layers."""
    how = dataclasses.replace(how, recompute=recompute)
    model = spec.Gpt(num_layers=23, num_heads=2, width=64, context_length=16)
    part = gpt.StageShare(samples, num_layers=23)

    def played() -> tuple[float, float, float, int]:
        trace = gpt.record.__wrapped__(model, 256, part, half=half, on_gpu=False)
        found = saved_bytes(trace, how), peak_bytes(trace, how), elements_of(trace)
        return *found, len(trace.segments)

    *short, num_played = played()
    monkeypatch.setattr(gpt, "alike", lambda num_layers: [1] * num_layers)
    *whole, num_whole = played()
    assert short == whole
    assert num_played < num_whole


@pytest.mark.parametrize(
    "model",
    [
        spec.Gpt(num_layers=3, num_heads=2, width=32),
        spec.Cnn(width=8),
        spec.ResNet(depth=14),
        spec.Mlp(width=50, num_layers=3),
        spec.Unet(width=4, depth=2),
    ],
    ids=lambda model: model.name,
)
def test_weights_are_counted_exactly(model: spec.Model) -> None:
    recipe = {"gpt": "language_model", "unet": "image_segmentation"}
    document = {
        "recipe": recipe.get(model.name, "image_classification"),
        "model": model.model_dump(),
        "data": {"source": "file:///data", "image_size": (16, 24)}
        if model.name != "gpt"
        else {"source": "file:///text.txt"},
    }
    job = JobSpec.model_validate(document)
    with torch.device("meta"):
        match model:
            case spec.Gpt():
                made: torch.nn.Module = Gpt(model, 256)
            case spec.Unet():
                made = Unet(model, (3, 16, 24), 5)
            case _:
                made = images.build(model, (3, 16, 24), 5)
    shapes = Shapes(vocabulary=256, image=(3, 16, 24), outputs=5)
    ((trace,),) = traces_of(job, shapes, on_gpu=False)
    assert elements_of(trace) == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("options", [{}, {"optimizer": {"name": "lamb"}}, {"recompute": "full"}])
def test_what_fits_is_known_to_the_byte(options: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(
        {
            "recipe": "language_model",
            "model": {"num_layers": 4, "num_heads": 4, "width": 64},
            "data": {"source": "file:///text.txt"},
            "train": {"global_batch_size": 16, **options},
            "resources": {"num_workers": 8},
        }
    )
    shapes = shapes_of(spec)
    ways = meshes(spec)
    assert len(ways) > 1
    for way in ways:
        total = memory_of(way, shapes).total
        assert fits(way, shapes, total)
        assert not fits(way, shapes, total - 1)
