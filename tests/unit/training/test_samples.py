from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_workers.training import samples
from ray_workers.training.data import Batches
from ray_workers.training.samples import DistantSamples, Feed, ResidentSamples, Rows, Samples

CPU = torch.device("cpu")
ROWS = np.arange(30)[::-1].copy()


def fetch(rows: Rows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).float()[:, None], torch.from_numpy(rows)


def feed(kept: ResidentSamples | DistantSamples, last_step: int = 20) -> Feed:
    batches = Batches(30, global_batch_size=8, seed=3, rank=1, world_size=2)
    return Feed(kept, batches, micro_batch_size=3, last_step=last_step)


def distant(reads: list[Rows] | None = None) -> DistantSamples:
    def told(rows: Rows) -> tuple[Tensor, Tensor]:
        if reads is not None:
            reads.append(rows)
        return fetch(rows)

    return DistantSamples(Samples(ROWS, told), CPU)


def test_a_split_that_is_small_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(samples.on_device(Samples(ROWS, fetch), CPU), ResidentSamples)
    monkeypatch.setattr(samples, "RESIDENT_BYTES", 100)
    assert isinstance(samples.on_device(Samples(ROWS, fetch), CPU), DistantSamples)


def test_samples_are_the_same_from_memory_and_from_afar() -> None:
    resident = samples.on_device(Samples(ROWS, fetch), CPU)
    at_hand, from_afar = feed(resident), feed(distant())
    for step in [1, 2, 3, 4, 5, 9, 2, 20, 1]:
        one, other = at_hand.at(step), from_afar.at(step)
        assert torch.equal(one.batch.indices, other.batch.indices)
        assert [len(t) for _, t in one.micro_batches] == [len(t) for _, t in other.micro_batches]
        for (x, y), (a, b) in zip(one.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(x, a)
            assert torch.equal(y, b)


def test_the_next_step_is_read_while_this_one_is_computed() -> None:
    second_read = threading.Event()
    reads: list[Rows] = []

    def told(rows: Rows) -> tuple[Tensor, Tensor]:
        reads.append(rows)
        if len(reads) == 4:  # two micro-batches a step
            second_read.set()
        return fetch(rows)

    ahead = feed(DistantSamples(Samples(ROWS, told), CPU))
    ahead.at(1)
    assert second_read.wait(10), "step 2 was not read until it was asked for"
    ahead.at(2)


def test_nothing_is_read_beyond_the_last_step() -> None:
    reads: list[Rows] = []
    whole = feed(distant(reads), last_step=3)
    for step in (1, 2, 3):
        whole.at(step)
    assert len(reads) == 6


def test_what_goes_wrong_while_reading_ahead_is_raised_at_its_step() -> None:
    def broken(rows: Rows) -> tuple[Tensor, Tensor]:
        if len(taken) > 2:
            raise OSError("the disk is gone")
        taken.append(rows)
        return fetch(rows)

    taken: list[Rows] = [ROWS]
    whole = feed(DistantSamples(Samples(ROWS, broken), CPU))
    whole.at(1)
    with pytest.raises(OSError, match="the disk is gone"):
        whole.at(2)
