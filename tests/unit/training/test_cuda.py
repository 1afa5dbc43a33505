"""The training loop on a GPU, where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ray_workers.training.snapshots import Camera, hold_for
from ray_workers.training.statefile import read_tensors, restore
from tests.unit.training.ranks import frames, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SPEC = {
    "recipe": "image_classification",
    "train": {"epochs": 3, "global_batch_size": 64, "optimizer": {"lr": 3e-3}},
}


def test_every_step_is_reported_though_figures_are_read_a_step_late(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, SPEC, world_size=1, device="cuda") == [0]
    told = [m for m in frames(tmp_path, kind="metrics") if "train/loss" in m["values"]]
    assert [m["step"] for m in told] == list(range(1, 70))
    assert told[-1]["values"]["train/loss"] < told[0]["values"]["train/loss"] / 2


def test_a_snapshot_is_the_state_as_it_was_though_the_gpu_goes_on() -> None:
    weights = torch.zeros(50_000_000, device="cuda")
    buffer, on_host = torch.zeros(3, device="cuda"), torch.zeros(())
    camera = Camera()
    for number in range(3):
        state = {"w": weights, "b": buffer, "step": on_host}
        snapshot = camera.take(state, [buffer])
        buffer += 1
        hold_for(snapshot)
        weights += 1
        on_host += 1
        snapshot.wait()
        tensors = read_tensors(bytes(snapshot.data[: snapshot.num_bytes]))
        found = restore(json.loads(json.dumps(snapshot.tree)), tensors)
        assert all(torch.all(tensor == number) for tensor in found.values())
