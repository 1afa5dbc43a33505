"""A small job for the real loop, faults in its ranks, and the results that they produce."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.results import read_weights
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.core.workload import Workload
from ray_workers.training.data import device_dataset
from ray_workers.training.parallel.meta_init import materialise
from tests.unit.training.ranks import frames


def document(num_workers: int, **train: Any) -> dict[str, Any]:
    """Return a small job with all options enabled that could cause a difference between two
    runs."""
    return {
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 24},
        "train": {
            "global_batch_size": 200,
            "epochs": 3,
            "schedule": {"name": "cosine", "warmup_steps": 4},
            "optimizer": {"lr": 0.003, "weight_decay": 0.01},
            **train,
        },
        "resources": {"num_workers": num_workers},
    }


def digits() -> Workload:
    spec = JobSpec.model_validate(document(1))
    work = recipes.RECIPES["image_classification"].build(spec, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), spec.train.seed)
    return work


def weights(home: Path, attempt: int = 1) -> dict[str, torch.Tensor]:
    return read_weights(home / f"attempt-{attempt}" / "artifacts")


def series(home: Path, key: str, *, rank: int = 0, attempt: int = 1) -> dict[int, float]:
    told = frames(home, rank=rank, attempt=attempt, kind="metrics")
    found = [(m["step"], m["values"][key]) for m in told if key in m["values"]]
    assert len({step for step, _ in found}) == len(found), f"{key} was reported twice for a step"
    return dict(found)


def die_at_step_18(task: RankTask) -> None:
    def die() -> None:
        wait_for_checkpoint(task, 15)
        os.kill(os.getpid(), signal.SIGKILL)

    arm(FaultPoint.STEP_ENDS, die, at_step=18)


def wait_for_checkpoint(task: RankTask, step: int) -> None:
    """Wait until rank 0 has reported the step's checkpoint, which is written by another thread."""
    home = Path(task.spool_dir).parents[2]
    while task.rank == 0:
        if step in [one["step"] for one in frames(home, attempt=task.attempt, kind="checkpoint")]:
            return
        time.sleep(0.001)


def assert_same(one: Any, other: Any) -> None:
    """Check that nested values are equal, and tensors bitwise equal."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def change_the_data(task: RankTask) -> None:
    build = recipes.RECIPES["image_classification"].build

    def changed(spec: JobSpec, policy: DataPolicy) -> Workload:
        return dataclasses.replace(build(spec, policy), fingerprint="f" * 64)

    changed_recipe = dataclasses.replace(recipes.RECIPES["image_classification"], build=changed)
    recipes.RECIPES["image_classification"] = changed_recipe  # type: ignore[index]


def keep_nothing_in_memory(task: RankTask) -> None:
    device_dataset.RESIDENT_BYTES = 0
    device_dataset.InMemorySamples = None  # type: ignore[assignment,misc]  # to make one is an error


def see_no_gpu(task: RankTask) -> None:
    """Hide GPUs, as for a real rank on the CPU, because some code in torch uses any available
    GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
