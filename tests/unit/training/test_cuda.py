"""The training loop on a GPU, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
