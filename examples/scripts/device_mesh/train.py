"""Train on a mesh with named axes, as in torchtitan: `tensor` splits the layers, `data` shards
them.

torchrun --nproc-per-node 2 train.py --tensor 2
dray submit --code . --workers 2 -- train.py --tensor 2
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, BATCH_SIZE = 16, 32


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + change


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--tensor", type=int, default=1, help="number of ranks that each layer is split over"
    )
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // options.tensor, options.tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Ranks that share a layer read the same samples.
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    for step in range(1, options.steps + 1):
        x = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sort(dim=1).values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)

    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        torch.save(whole, Path(options.output) / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
