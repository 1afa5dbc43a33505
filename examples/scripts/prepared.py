"""A custom training loop that recovers in place: every line that uses `train` is needed for that.

Runs as a single process (`python prepared.py`), under torchrun, and as a job with any number of
workers: `dray submit --code examples/scripts --workers 2 -- prepared.py`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dray import train


def samples() -> TensorDataset:
    """2,000 points on two interleaved spirals, each labeled with its spiral."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(2000) % 2
    angles = 6 * torch.rand(2000, generator=generator)
    radii = angles + 0.1 * torch.randn(2000, generator=generator)
    turns = angles + torch.pi * kinds
    points = torch.stack([radii * turns.cos(), radii * turns.sin()], dim=1)
    return TensorDataset(points / 6, kinds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()

    train.init(seed=1, checkpoint_every_s=60)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    batches = DataLoader(samples(), batch_size=100, shuffle=True)
    model, optimizer, loader = train.prepare(model, optimizer, batches, scheduler=scheduler)

    for epoch in train.epochs(options.epochs):
        num_right = num_seen = 0
        for points, kinds in loader:
            optimizer.zero_grad()
            scores = model(points)
            loss = nn.functional.cross_entropy(scores, kinds)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            num_right += int((scores.argmax(dim=1) == kinds).sum())
            num_seen += len(kinds)
            train.report({"train/loss": loss})
        scheduler.step()
        if train.context().rank == 0:
            print(f"epoch {epoch}: {num_right / max(num_seen, 1):.0%} of rank 0's points are right")

    if train.context().rank == 0:
        torch.save(model.state_dict(), "model.pt")
        train.save_artifact("model.pt")


if __name__ == "__main__":
    main()
