"""The contenders save the same state, and what is said of them follows from the samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.checkpoint_stall import measure
from benchmarks.checkpoint_stall.rank import Loop
from benchmarks.checkpoint_stall.work import WORKS, Work
from ray_workers.training.checkpoint import safetensors_layout


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Loop(Work("tiny", 8, num_layers=2, batch_size=4, saves_per_round=1), tmp_path)
    finally:
        dist.destroy_process_group()


def test_the_states_have_the_sizes_that_their_names_say() -> None:
    for name, work in WORKS.items():
        megabytes = work.state_bytes / 1e6
        assert megabytes == pytest.approx(float(name.removesuffix(" MB")), rel=0.02)


def test_every_contender_leaves_the_whole_state_on_the_disk(loop: Loop, tmp_path: Path) -> None:
    """Seen before it is tidied away."""
    for name, saver in loop.savers.items():
        if name in (measure.NOTHING, measure.COPY):
            continue
        loop.train(saver)
        saver.save(loop.step)
        weights = loop.model[0].weight.detach().clone()
        while saver.is_saving():
            loop.train(saver)
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) > 12 * weights.numel()
        if name == measure.OURS:
            (path,) = [path for path in files if path.suffix == ".safetensors"]
            saved = safetensors_layout.read_tensors(path.read_bytes())
            assert torch.equal(saved["model/0.weight"], weights)
        saver.tidy()


def test_one_repetition_is_measured_for_each(loop: Loop) -> None:
    stalls = {name: loop.turn(saver) for name, saver in loop.savers.items()}
    assert set(stalls) == set(measure.LABELS)
    assert all(math.isfinite(stall) for stall in stalls.values())


def test_goals_are_met_by_the_ratio_of_medians() -> None:
    stalls = {
        measure.OURS: [0.01, 0.012, 0.011],
        measure.DCP: [0.01, 0.01, 0.01],
        measure.TORCH_SAVE: [0.2, 0.2, 0.2],
        measure.COPY: [0.005, 0.005, 0.005],
        measure.NOTHING: [-0.001, 0.001, 0.0],
    }
    result = measure.conclude({"50 MB, 1 rank": stalls})
    assert [each.met for each in result.comparisons] == [False, True]
    assert result.rows[0].label == "50 MB, 1 rank: dray"
