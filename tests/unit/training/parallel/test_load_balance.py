"""A slow rank gets less work and is reported, without affecting what is learned."""

from __future__ import annotations

import functools
import itertools
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.data.prefetcher import Share
from ray_workers.training.data.sampler import Batch as BatchOfShare
from ray_workers.training.data.sampler import share_by
from ray_workers.training.loop.step_reporter import Batch
from ray_workers.training.parallel.data_parallel import load_balance
from ray_workers.training.parallel.data_parallel.load_balance import in_proportion
from ray_workers.training.parallel.gradients import EngineParts, Pass
from tests.marks import SOAK
from tests.unit.training.jobs import series
from tests.unit.training.parallel.test_model_parallel import EQUAL, furthest, images
from tests.unit.training.ranks import frames, run_ranks

SLOW = 1
SECONDS_PER_SAMPLE = 0.002
"""Additional time of the slow rank; the others take a fraction of it."""


def test_parts_are_in_proportion_to_the_speeds() -> None:
    assert in_proportion([1.0, 1.0, 2.0]) == pytest.approx([0.4, 0.4, 0.2])


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9),
    st.integers(min_value=0, max_value=300),
)
def test_every_item_is_in_one_share(speeds: list[float], num_items: int) -> None:
    parts = [speed / sum(speeds) for speed in speeds]
    shares = [share_by(parts, num_items, number) for number in range(len(parts))]
    assert shares[0][0] == 0
    assert shares[-1][1] == num_items
    assert all(one[1] == other[0] for one, other in itertools.pairwise(shares))
    assert all(start <= stop for start, stop in shares)
    if num_items >= len(parts):
        assert all(start < stop for start, stop in shares)


class _Costly(torch.autograd.Function):
    """Takes as long as a model would: the backward pass takes twice as long as the forward pass."""

    clock = 0.0

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        _Costly.clock += len(outputs)
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Costly.clock += 2 * len(grads[0])
        return grads[0]


class _CostlyModel(torch.nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, _Costly.apply(super().forward(inputs)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("pieces", [[7], [4, 3], [3, 3, 1], [1] * 7])
def test_a_sample_takes_as_long_however_its_share_is_cut(
    monkeypatch: pytest.MonkeyPatch, pieces: list[int]
) -> None:
    monkeypatch.setattr(load_balance, "time", SimpleNamespace(perf_counter=lambda: _Costly.clock))
    engine = load_balance.TimedGradientEngine(
        EngineParts(
            _CostlyModel(2, 2), lambda outputs, targets: (outputs - targets).sum(), nullcontext
        )
    )
    batch = BatchOfShare(0, torch.arange(sum(pieces)), sum(pieces), is_empty=False)
    samples = [(torch.ones(size, 2), torch.zeros(size, 2)) for size in pieces]
    engine.backward(Pass([Share(batch, samples)]))
    assert engine.seconds_per_sample == [3.0]


@SOAK
def test_a_slow_rank_gets_less_to_do(tmp_path: Path) -> None:
    even, balanced = tmp_path / "even", tmp_path / "balanced"
    job = images(3, {}, max_steps=40, epochs=4)
    assert run_ranks(even, job, world_size=3) == [0] * 3
    job |= {"parallel": {"balance": "auto"}}
    assert run_ranks(balanced, job, world_size=3, before=_Slow(tmp_path)) == [0] * 3
    sizes = [int(line) for line in (tmp_path / "sizes").read_text().split()]
    assert max(sizes[-5:]) < 0.5 * min(sizes[:5])
    (told, *_) = frames(balanced, rank=0, kind="stragglers")
    assert told["ranks"] == [SLOW]
    assert told["slowdown"][str(SLOW)] > 2
    assert told["lost_s"] > 2 * SECONDS_PER_SAMPLE * told["num_steps"]
    assert furthest(balanced, even) < EQUAL
    losses = series(balanced, "train/loss")
    assert losses == pytest.approx(series(even, "train/loss"), rel=1e-4)


@SOAK
@pytest.mark.parametrize(("difference", "is_cut_anew"), [(0.02, False), (0.5, True)])
def test_shares_stay_equal_to_the_bit_where_nothing_is_won_by_others(
    difference: float, is_cut_anew: bool, tmp_path: Path
) -> None:
    job = images(2, {}, max_steps=9)
    plain, balanced = tmp_path / "plain", tmp_path / "balanced"
    assert run_ranks(plain, job, world_size=2) == [0, 0]
    job |= {"parallel": {"balance": "auto"}}
    clock = functools.partial(_count_time, difference)
    assert run_ranks(balanced, job, world_size=2, before=clock) == [0, 0]
    assert (furthest(balanced, plain) > 0.0) == is_cut_anew


def _count_time(difference: float, task: RankTask) -> None:
    """Make each pass over a share take one second on rank 0, and longer by this fraction on rank
    1."""
    seconds = itertools.count(step=1 + difference * task.rank)
    load_balance.time = SimpleNamespace(perf_counter=lambda: next(seconds))  # type: ignore[assignment]


def test_shares_stay_as_they_are_while_a_rank_has_had_nothing_to_do(tmp_path: Path) -> None:
    """There are fewer samples than ranks."""
    table = tmp_path / "table.csv"
    table.write_text("x,y\n1,2\n2,4\n3,6\n4,8\n")
    job = {
        "recipe": "tabular_regression",
        "data": {"source": table.as_uri(), "target": "y", "validation_fraction": 0.5},
        "train": {"global_batch_size": 3, "epochs": 9},
        "resources": {"num_workers": 3},
        "parallel": {"balance": "auto"},
    }
    assert run_ranks(tmp_path, job, world_size=3) == [0, 0, 0]
    assert set(series(tmp_path, "train/loss")) == set(range(1, 10))


def test_a_rank_that_has_nothing_of_a_short_batch_goes_on(tmp_path: Path) -> None:
    """An epoch of 1,437 samples ends with a batch of one sample, which leaves two ranks without
    samples."""
    job = images(3, {"balance": "auto"}, global_batch_size=359, max_steps=7)
    assert run_ranks(tmp_path, job, world_size=3) == [0, 0, 0]
    assert set(series(tmp_path, "train/loss")) == set(range(1, 8))


class _Slow:
    """Makes one rank slow, and makes it record how many samples it gets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, task: RankTask) -> None:
        if task.rank != SLOW:
            return
        sizes = (self._folder / "sizes").open("a", buffering=1)

        def compute_slowly(batch: Batch) -> None:
            (share,) = batch.feed.shares
            size = len(share.batch.indices)
            sizes.write(f"{size}\n")
            time.sleep(SECONDS_PER_SAMPLE * size)

        arm_with(FaultPoint.SHARE_BEGINS, compute_slowly)
