"""Train a transformer whose blocks are sharded over the ranks by `fully_shard` (FSDP2).

torchrun --nproc-per-node 2 train.py
dray submit --code . --workers 2 -- train.py
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

VOCABULARY, LENGTH, BATCH_SIZE = 16, 12, 16


class Reverser(nn.Module):
    """Predicts the tokens of a sequence in reverse order."""

    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = Reverser()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    generator = torch.Generator().manual_seed(rank)  # each rank draws different sequences
    for step in range(1, options.steps + 1):
        tokens = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH), generator=generator)
        scores = model(tokens)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flip(1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)

    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        torch.save(whole, Path(options.output) / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
