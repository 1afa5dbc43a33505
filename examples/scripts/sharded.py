"""A small transformer whose blocks are sharded over all ranks (FSDP2) by `train.prepare`.

Runs as a single process (`python sharded.py`), under torchrun, and as a job whose document contains
`parallel: {shard: 2}` with `resources: {num_workers: 2}`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dray import train


class SumModel(nn.Module):
    """Predicts the last digit of the sum of a sequence."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, width)
        self.positions = nn.Embedding(8, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.digits(numbers) + self.positions(torch.arange(numbers.shape[1]))
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x.mean(dim=1))
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()

    train.init(seed=1, checkpoint_every_steps=20)
    torch.manual_seed(1)
    numbers = torch.randint(0, 10, (960, 2))
    data = TensorDataset(numbers, numbers.sum(dim=1) % 10)
    model = SumModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(data, batch_size=48, shuffle=True, drop_last=True)
    model, optimizer, loader = train.prepare(
        model, optimizer, batches, blocks="layers.*", recompute=options.recompute
    )
    for epoch in train.epochs(options.epochs):
        losses = []  # stays empty if the process restarts at the end of an epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            train.report({"train/loss": loss})
            losses.append(loss.item())
        if train.context().rank == 0 and losses:
            print(f"epoch {epoch}: the last loss of rank 0's share is {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
