"""Train a network with DeepSpeed ZeRO: stage 1 shards optimizer states, 2 gradients, 3 weights too.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train.py --stage 3
    dray submit --code . --workers 2 --requirements requirements.txt --env DS_ACCELERATOR=cpu \
        -- train.py --stage 3
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    engine, *_ = deepspeed.initialize(
        model=network,
        model_parameters=network.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    generator = torch.Generator().manual_seed(rank)
    for step in range(1, options.steps + 1):
        x = torch.randn(32, 8, generator=generator)
        loss = nn.functional.mse_loss(engine(x), x.flip(1))
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)

    with deepspeed.zero.GatheredParameters(list(network.parameters()), modifier_rank=0):
        if rank == 0:
            torch.save(network.state_dict(), Path(options.output) / "model.pt")


if __name__ == "__main__":
    main()
