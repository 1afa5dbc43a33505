"""A training script for torchrun, plus the lines that use dray: they report metrics, save
checkpoints, resume from them and keep the result.

Fits y = 3x + 2 with DistributedDataParallel. Also runs unchanged under `torchrun`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dray.train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(256, 1)
    y = 3 * x + 2

    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    if checkpoint := dray.train.load_checkpoint():
        done = checkpoint.step
        model.module.load_state_dict(torch.load(checkpoint.path / "linear.pt"))

    for step in range(done + 1, arguments.steps + 1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dray.train.report(step, {"train/loss": loss.item()}, total_steps=arguments.steps)
        if rank == 0 and step % arguments.save_every == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.module.state_dict(), Path(folder, "linear.pt"))
                dray.train.save_checkpoint(folder, step)

    if rank == 0:
        weight, bias = (p.item() for p in model.parameters())
        print(f"y = {weight:.3f} x + {bias:.3f}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "linear.pt")
            torch.save(model.module.state_dict(), path)
            dray.train.save_artifact(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
