"""A rank of a group that divides a model among pretended GPUs dies: the weights are the same as
without the loss. The operations follow the rules of NCCL (`tests.fakes.pretend_nccl`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.loop.trainer import Trainer
from tests.marks import soak
from tests.unit.training.elastic.test_recovery import (
    POINTS,
    RANK_0_ONLY,
    Fault,
    _at,
    die,
    once,
)
from tests.unit.training.elastic.test_recovery_on_gpus import train
from tests.unit.training.jobs import assert_same, series, weights
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import replaced

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data x shard": (4, {"shard": 2}),
    "data x shard, ZeRO 1": (4, {"shard": 2, "zero": 1}),
    "data x tensor": (4, {"tensor": 2}),
    "data x context": (4, {"context": 2}),
    "data x pipeline": (4, {"pipeline": 2}),
    "shard": (2, {"shard": 2}),
    "ZeRO 1": (2, {"shard": 2, "zero": 1}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
IN_LAYER = "in a layer's backward pass"


def job(home: Path, mesh: str) -> dict[str, Any]:
    """Return a job of 8 steps, with an evaluation after step 6. Models without replicas are copied
    to the memory of the other rank every 3 steps."""
    num_ranks, parallel = MESHES[mesh]
    spec = brief(home, num_ranks, parallel)
    if "data" not in mesh:
        spec |= {"checkpoint": {"in_memory": {"every_steps": 3}}}
    return spec


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The home of a run without faults, created once for each mesh."""

    @functools.cache
    def run(mesh: str) -> Path:
        home = tmp_path_factory.mktemp("undisturbed")
        assert train(home, job(home, mesh)) == [0] * MESHES[mesh][0]
        return home

    return run


def _in_layer(step: int) -> None:
    """In the middle of the backward pass, when some layers have exchanged their gradients. FSDP
    replaces the parameters, so use a layer's output."""

    def watch(trainer: Trainer) -> None:
        layers = [
            each
            for each in trainer.strategy.model.modules()
            if next(each.parameters(recurse=False), None) is not None
        ]
        layers[len(layers) // 2].register_forward_hook(_die_at_gradient)

    arm_with(FaultPoint.STEP_BEGINS, watch, at_step=step)


def _die_at_gradient(layer: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda _: die())  # type: ignore[no-untyped-call]


OF_DIVIDED: dict[str, Callable[[int], None]] = {
    **{name: point for name, point in POINTS.items() if name != "in the backward pass"},
    IN_LAYER: _in_layer,
    "before the losses are added up": _at(FaultPoint.BACKWARD_DONE),
}


class DividedFault(Fault):
    def __call__(self, task: Any) -> None:
        if task.rank == self.rank and task.incarnation == 0:
            OF_DIVIDED[self.point](self.step)


QUICK = [("shard", 1, IN_LAYER)]
FIRST = "before the first step"
"""Without replicas, the first copy might not be complete."""
ALL = [
    (mesh, rank, point)
    for mesh, (num_ranks, _) in MESHES.items()
    for rank in range(num_ranks)
    for point in sorted(OF_DIVIDED)
    if (rank == 0 or point not in RANK_0_ONLY) and ("data" in mesh or point != FIRST)
]


@pytest.mark.parametrize(
    ("mesh", "rank", "point"), [*QUICK, *(soak(*one) for one in ALL if one not in QUICK)]
)
def test_a_lost_rank_gets_its_share_from_another_rank(
    mesh: str, rank: int, point: str, tmp_path: Path, undisturbed: Callable[[str], Path]
) -> None:
    codes = train(tmp_path, job(tmp_path, mesh), DividedFault(rank, point), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0] * MESHES[mesh][0], [rank])
    assert_same(weights(tmp_path), weights(undisturbed(mesh)))
    for key in ("train/loss", "val/loss"):
        assert once(tmp_path, key) == series(undisturbed(mesh), key)
