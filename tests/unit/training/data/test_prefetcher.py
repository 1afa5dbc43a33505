"""Prefetching: what is read, when, by which process, and what happens if the process dies."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_workers.training.data import device_dataset
from ray_workers.training.data.device_dataset import (
    InMemorySamples,
    MemoryMappedSamples,
    Rows,
    Samples,
)
from ray_workers.training.data.prefetcher import Prefetcher
from ray_workers.training.data.sampler import DistributedBatchSampler

CPU = torch.device("cpu")
ROWS = np.arange(30)[::-1].copy()


def fetch(rows: Rows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).float()[:, None], torch.from_numpy(rows)


def feed(
    kept: InMemorySamples | MemoryMappedSamples, last_step: int = 20, loader_workers: int = 0
) -> Prefetcher:
    batches = DistributedBatchSampler(30, samples_per_step=8, seed=3, shares=[1], num_shares=2)
    return Prefetcher(kept, batches, 3, last_step=last_step, loader_workers=loader_workers)


def distant(reads: list[Rows] | None = None) -> MemoryMappedSamples:
    def told(rows: Rows) -> tuple[Tensor, Tensor]:
        if reads is not None:
            reads.append(rows)
        return fetch(rows)

    return MemoryMappedSamples(Samples(ROWS, told), CPU)


@pytest.mark.parametrize("loader_workers", [0, 1, 3])
def test_samples_are_the_same_from_memory_and_from_afar(loader_workers: int) -> None:
    resident = device_dataset.on_device(Samples(ROWS, fetch), CPU)
    at_hand, from_afar = feed(resident), feed(distant(), loader_workers=loader_workers)
    for step in [1, 2, 3, 4, 5, 9, 2, 20, 1]:
        one, other = at_hand.at(step), from_afar.at(step)
        (mine,), (theirs,) = one.shares, other.shares
        assert torch.equal(mine.batch.indices, theirs.batch.indices)
        assert [len(t) for _, t in mine.micro_batches] == [len(t) for _, t in theirs.micro_batches]
        for (x, y), (a, b) in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            assert torch.equal(x, a)
            assert torch.equal(y, b)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_batches_of_several_steps_have_their_samples_in_the_same_order(loader_workers: int) -> None:
    """This includes pieces that were prefetched before the batch size changed."""

    def sampler(part: int, parts: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(
            30, samples_per_step=8, seed=3, shares=[part], num_shares=parts
        )

    order, other_half = sampler(0, 1), sampler(0, 2)
    fed = feed(distant(), loader_workers=loader_workers)
    try:
        fed.at(1)
        fed.end_batches(lambda first: min(first + 2, -(-first // 4) * 4), 2)
        for first, last in ((2, 4), (5, 7), (8, 8), (9, 11)):
            feeding = fed.at(first)
            (mine,) = feeding.shares
            (start,), (whole,) = other_half.at(first, last), order.at(first, last)
            assert feeding.num_global == len(whole.indices)
            assert torch.equal(torch.cat([start.indices, mine.batch.indices]), whole.indices)
            rows = torch.cat([targets for _, targets in mine.micro_batches])
            assert rows.tolist() == ROWS[mine.batch.indices.numpy()].tolist()
            by_steps = [order.at(step, step)[0].indices for step in range(first, last + 1)]
            assert torch.equal(torch.cat(by_steps), whole.indices)
    finally:
        fed.close()


def test_the_next_step_is_read_while_this_one_is_computed() -> None:
    second_read = threading.Event()
    reads: list[Rows] = []

    def told(rows: Rows) -> tuple[Tensor, Tensor]:
        reads.append(rows)
        if len(reads) == 4:  # two micro-batches per step
            second_read.set()
        return fetch(rows)

    ahead = feed(MemoryMappedSamples(Samples(ROWS, told), CPU))
    ahead.at(1)
    assert second_read.wait(60), "step 2 was not read until it was asked for"
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
    whole = feed(MemoryMappedSamples(Samples(ROWS, broken), CPU))
    whole.at(1)
    with pytest.raises(OSError, match="the disk is gone"):
        whole.at(2)


def test_a_loader_process_that_is_killed_is_replaced_and_its_step_is_read_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resident = device_dataset.on_device(Samples(ROWS, fetch), CPU)
    at_hand, from_afar = feed(resident), feed(dying(tmp_path, 1), loader_workers=2)
    for step in range(1, 7):
        (mine,), (theirs,) = at_hand.at(step).shares, from_afar.at(step).shares
        assert torch.equal(
            torch.cat([y for _, y in mine.micro_batches]),
            torch.cat([y for _, y in theirs.micro_batches]),
        )
    assert "a loader process was killed" in capfd.readouterr().out


def test_loader_processes_that_are_killed_each_time_end_the_training_with_what_to_do(
    tmp_path: Path,
) -> None:
    hopeless = feed(dying(tmp_path, 1000), loader_workers=1)
    with pytest.raises(RuntimeError, match=r"killed 3 times .* data.loader_workers"):
        hopeless.at(1)


def dying(folder: Path, times: int) -> MemoryMappedSamples:
    """Return samples whose reader is killed this number of times."""

    def told(rows: Rows) -> tuple[Tensor, Tensor]:
        for number in range(times):
            try:
                (folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch(rows)

    return MemoryMappedSamples(Samples(ROWS, told), CPU)


def test_a_loader_process_holds_no_connection_of_its_rank() -> None:
    """Otherwise a peer would not notice the rank's end while the loader is alive."""
    ours, theirs = socket.socketpair()
    inodes = {os.fstat(end.fileno()).st_ino for end in (ours, theirs)}

    def told(rows: Rows) -> tuple[Tensor, Tensor]:
        held = sum(is_one_of(entry, inodes) for entry in Path("/proc/self/fd").iterdir())
        return torch.full((len(rows), 1), float(held)), torch.from_numpy(rows)

    with ours, theirs:
        (share,) = (
            feed(MemoryMappedSamples(Samples(ROWS, told), CPU), loader_workers=1).at(1).shares
        )
    assert [inputs.max().item() for inputs, _ in share.micro_batches] == [0.0, 0.0]


def is_one_of(entry: Path, inodes: set[int]) -> bool:
    try:
        return entry.stat().st_ino in inodes
    except OSError:
        return False  # of the folder itself, closed by now
