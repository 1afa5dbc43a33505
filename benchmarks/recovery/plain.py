"""The plain DDP script that torchrun and Ray Train run, which saves and resumes.

It imports nothing from dray, and logs when it committed each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.first_step.plain import LR, NUM_SAMPLES, build_model, load_images
from benchmarks.recovery.commits import CommitLog
from benchmarks.recovery.work import GLOBAL_BATCH_SIZE, NUM_STEPS, SAVE_EVERY_STEPS

State = dict[str, Any]


class Checkpoints(Protocol):
    """Storage for the state. All ranks call both methods."""

    def newest(self) -> State | None: ...

    def save(self, step: int, state: State) -> None: ...


class InFile:
    """Rank 0 writes the whole state to one file, which replaces the previous one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "checkpoint.pt"

    def newest(self) -> State | None:
        return torch.load(self._path, weights_only=True) if self._path.exists() else None

    def save(self, step: int, state: State) -> None:
        if dist.get_rank() == 0:
            partial = self._path.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(self._path)


class Samples:
    """The images, and the samples of each rank in each step."""

    def __init__(self) -> None:
        self._images, self._labels = load_images()

    def of(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        order = torch.randperm(NUM_SAMPLES, generator=generator)
        batch = order[:GLOBAL_BATCH_SIZE][rank::world_size]
        return self._images[batch], self._labels[batch]


def make_optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)


def train(folder: Path, checkpoints: Checkpoints) -> None:
    """Train from the newest checkpoint to the end, in the existing process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log = CommitLog(folder, rank)
    samples = Samples()
    model = build_model()
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    loss_of = nn.CrossEntropyLoss()
    done = 0
    state = checkpoints.newest()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    for step in range(done + 1, NUM_STEPS + 1):
        inputs, targets = samples.of(step, rank, world_size)
        loss_of(module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.committed(step)
        if step % SAVE_EVERY_STEPS == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(step, {**whole, "step": step})


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), InFile(Path(sys.argv[1])))
    dist.barrier()
    # The measurement is complete. Skip gloo's shutdown, which sometimes aborts a rank whose peer
    # has exited.
    os._exit(0)
