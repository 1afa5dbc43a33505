"""The training as a script, with the few `dray.train` lines that enable it to recover in place.

    prepared_script.py STEPS BATCH_SIZE

`plain.py` of benchmarks/first_step is uploaded with it.
"""

from __future__ import annotations

import sys

import torch
from plain import LR, build_model, load_images  # type: ignore[import-not-found]
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from dray import train


def main(num_steps: int, batch_size: int) -> None:
    torch.set_num_threads(1)
    train.init(seed=1)
    batches = DataLoader(TensorDataset(*load_images()), batch_size=batch_size, shuffle=True)
    model = build_model()
    optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    model, optimizer, loader = train.prepare(model, optimizer, batches)
    loss_of = nn.CrossEntropyLoss()
    train.progress(total_steps=num_steps)
    for _ in train.epochs(num_steps):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
