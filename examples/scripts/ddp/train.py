"""Train a small network with DistributedDataParallel, as in the PyTorch tutorials.

torchrun --nproc-per-node 2 train.py
dray submit --code . --workers 2 -- train.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def samples() -> TensorDataset:
    """512 points in the plane, labeled by whether they are inside the unit circle."""
    points = 2 * torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) < 1).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(samples())
    loader = DataLoader(samples(), batch_size=32, sampler=sampler)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for points, kinds in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), kinds)
            loss.backward()
            optimizer.step()
        dist.all_reduce(mean := loss.detach(), dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.9f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(network.state_dict(), Path(options.output) / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
