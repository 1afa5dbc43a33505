"""A plain DDP script: what the peers run. It trains the steps of the job and reports nothing.

It leaves in the folder it is given, for each rank, when it came how far (Unix seconds). The
first moment is taken before torch is imported, because that is a part of a start.
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

from benchmarks.first_step.work import JOB
from dray.spec import JobSpec
from ray_workers.recipes import RECIPES


def train(folder: Path, entered: float) -> None:
    """Train in the process group of the environment, or in the one that there already is."""
    marks = {"entered": entered}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    marks["joined"] = time.time()

    spec = JobSpec.model_validate(JOB)
    workload = RECIPES["image_classification"].build(spec)
    model = DistributedDataParallel(workload.model, gradient_as_bucket_view=True)
    optimizer = AdamW(model.parameters(), lr=spec.train.optimizer.lr, weight_decay=0.0, fused=True)
    loss_of = nn.CrossEntropyLoss()
    marks["built"] = time.time()

    samples, batch_size = workload.train, spec.train.global_batch_size
    for step in range(spec.train.max_steps or 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randperm(len(samples), generator=generator)[:batch_size][rank::world_size]
        loss_of(model(samples.inputs[batch]), samples.targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.setdefault("first_step", time.time())
    (folder / f"{rank}.json").write_text(json.dumps(marks))


def main(folder: Path) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    train(folder, _ENTERED)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
