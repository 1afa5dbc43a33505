"""A GAN that recovers in place: two models with their optimizers, two backward passes per batch.

Runs as a single process (`python gan.py`), under torchrun, and as a job with any number of workers:
`dray submit --code examples/scripts --workers 2 -- gan.py`.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from dray import train

NOISE = 8
"""Random numbers that the generator turns into one point."""


def samples() -> TensorDataset:
    """4,000 points scattered around the corners of an octagon."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(4000) % 8 * (math.pi / 4)
    corners = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(corners + 0.05 * torch.randn(4000, 2, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.001)
    options = parser.parse_args()

    train.init(seed=1, checkpoint_every_s=60)
    torch.manual_seed(1)
    generator = nn.Sequential(
        nn.Linear(NOISE, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 2),
    )
    critic = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=options.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=options.lr, betas=(0.5, 0.999))
    batches = DataLoader(samples(), batch_size=100, shuffle=True)
    _, _, loader = train.prepare([generator, critic], [optimizer_g, optimizer_d], batches)

    for epoch in train.epochs(options.epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE))

            optimizer_d.zero_grad()
            loss_d = loss_of(critic(real), 1.0) + loss_of(critic(fake.detach()), 0.0)
            loss_d.backward()  # the batch's first gradient exchange
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = loss_of(critic(fake), 1.0)
            loss_g.backward()  # the second
            optimizer_g.step()
            train.report({"train/loss_d": loss_d, "train/loss_g": loss_g})
        if train.context().rank == 0:
            print(f"epoch {epoch} done")

    if train.context().rank == 0:
        torch.save(generator.state_dict(), "generator.pt")
        train.save_artifact("generator.pt")


def loss_of(scores: torch.Tensor, target: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


if __name__ == "__main__":
    main()
