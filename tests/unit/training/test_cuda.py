"""The training loop on a GPU, where there is one.

It asks for neither Ray nor a database: with torch alone, `pytest --noconftest` runs it.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_workers.shared.contracts import RankTask
from ray_workers.training.checkpoint.safetensors_layout import read_tensors, restore
from ray_workers.training.checkpoint.staging import Stager, hold_for
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.unit.training.jobs import assert_same, weights
from tests.unit.training.ranks import frames, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SPEC: dict[str, Any] = {
    "recipe": "image_classification",
    "train": {"epochs": 3, "global_batch_size": 64, "optimizer": {"lr": 3e-3}},
}


def test_every_step_is_reported_though_figures_are_read_a_step_late(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, SPEC, world_size=1, device="cuda") == [0]
    told = [m for m in frames(tmp_path, kind="metrics") if "train/loss" in m["values"]]
    assert [m["step"] for m in told] == list(range(1, 70))
    assert told[-1]["values"]["train/loss"] < told[0]["values"]["train/loss"] / 2


def test_a_step_is_told_to_take_as_long_as_the_gpu_takes(tmp_path: Path) -> None:
    """The first one after an evaluation too, which the GPU has not begun when it was launched; and
    the CPU does not wait for the GPU to ask for the next batch."""
    assert run_ranks(tmp_path, SPEC, world_size=1, device="cuda", before=_keep_busy) == [0]
    told = [m["values"] for m in frames(tmp_path, kind="metrics") if "train/loss" in m["values"]]
    assert min(values["perf/step_time_s"] for values in told) > BUSY_S
    assert statistics.median(values["perf/data_wait_s"] for values in told) < BUSY_S / 2


BUSY_S = 0.05
CYCLES = 150_000_000
"""More than so many seconds, at up to 3 GHz."""


def _keep_busy(task: RankTask) -> None:
    """Have the GPU do nothing for a while at the begin of each step."""
    arm(FaultPoint.STEP_BEGINS, lambda: torch.cuda._sleep(CYCLES))


def test_a_snapshot_is_the_state_as_it_was_though_the_gpu_goes_on() -> None:
    weights = torch.zeros(50_000_000, device="cuda")
    buffer, on_host = torch.zeros(3, device="cuda"), torch.zeros(())
    camera = Stager()
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


def test_a_snapshot_outlives_what_it_was_taken_of() -> None:
    """The memory of a state that was made for it alone goes to whatever is computed next."""
    camera, size = Stager(), 50_000_000
    for number in range(3):
        snapshot = camera.take({"w": torch.full((size,), float(number), device="cuda")})
        others = [torch.full((size,), -1.0, device="cuda") for _ in range(4)]
        snapshot.wait()
        tensors = read_tensors(bytes(snapshot.data[: snapshot.num_bytes]))
        found = restore(json.loads(json.dumps(snapshot.tree)), tensors)
        assert torch.all(found["w"] == number)
        assert all(other[0] == -1.0 for other in others)


def test_optimizer_state_that_is_offloaded_leaves_room_and_changes_nothing(tmp_path: Path) -> None:
    model = {"name": "mlp", "width": 4096, "num_layers": 4}
    peaks = {}
    for offload in (False, True):
        home = tmp_path / str(offload)
        optimizer = {"name": "adamw", "lr": 1e-3, "offload": offload}
        train = {**SPEC["train"], "epochs": 1, "optimizer": optimizer}
        job = {**SPEC, "model": model, "train": train, "resources": {"gpus_per_worker": 1}}
        report = functools.partial(_report_memory, str(home))
        assert run_ranks(home, job, world_size=1, device="cuda", before=report) == [0]
        peaks[offload] = int((home / "held").read_text())
    assert_same(weights(tmp_path / "False"), weights(tmp_path / "True"))
    state_bytes = 2 * 4 * sum(tensor.numel() for tensor in weights(tmp_path / "True").values())
    assert peaks[False] - peaks[True] > 0.8 * state_bytes


def _report_memory(home: str, task: RankTask) -> None:
    """Write down what the GPU holds between two steps."""
    path = Path(home, "held")
    arm(
        FaultPoint.STEP_BEGINS,
        lambda: path.write_text(str(torch.cuda.memory_allocated())),
    )
