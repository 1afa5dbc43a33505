"""The plain DDP script that the peers run. It imports nothing from dray and reports nothing.

It trains the first steps of the job: the recipe's model on the recipe's images, with the same batch
size and optimizer. Each rank writes the times of its milestones (Unix seconds) to the given folder.
The first milestone is before torch is imported, because the import is part of a start.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

_ENTERED = time.time()

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

NUM_STEPS = 40
GLOBAL_BATCH_SIZE = 64
LR = 1e-3
WIDTH = 32
NUM_CLASSES = 10
NUM_SAMPLES = 1438
MAX_PIXEL = 16.0


def build_model() -> nn.Module:
    """Return the recipe's CNN: (N, 1, 8, 8) pixels in 0..1 -> (N, 10) logits."""

    def conv(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        filters = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return filters, nn.GroupNorm(8, outputs), nn.ReLU()

    return nn.Sequential(
        *conv(1, WIDTH),
        *conv(WIDTH, 2 * WIDTH),
        nn.MaxPool2d(2),
        *conv(2 * WIDTH, 2 * WIDTH),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 4, NUM_CLASSES),
    )


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ((N, 1, 8, 8) float32 pixels in 0..1, (N,) int64 labels)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images[:NUM_SAMPLES, None] / MAX_PIXEL).float()
    return images, torch.from_numpy(data.target[:NUM_SAMPLES]).long()


def train(folder: Path, entered: float) -> None:
    """Train in the existing process group, or otherwise in the group defined by the environment."""
    marks = {"entered": entered, "imported": time.time()}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    marks["joined"] = time.time()
    images, labels = load_images()
    marks["loaded"] = time.time()
    model = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    loss_of = nn.CrossEntropyLoss()
    marks["built"] = time.time()
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        order = torch.randperm(NUM_SAMPLES, generator=generator)
        batch = order[:GLOBAL_BATCH_SIZE][rank::world_size]
        loss_of(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.setdefault("first_step", time.time())
    (folder / f"{rank}.json").write_text(json.dumps(marks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), _ENTERED)
    dist.barrier()
    # The measurement is complete. Skip gloo's shutdown, which sometimes aborts a rank whose peer
    # has exited.
    os._exit(0)
