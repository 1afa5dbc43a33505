"""Train a LightningModule with a Trainer that uses the `ddp` strategy.

torchrun --nproc-per-node 2 train.py
dray submit --code . --workers 2 --requirements requirements.txt -- train.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """Learns to multiply two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    lightning.seed_everything(0)
    x = torch.rand(512, 2)
    loader = DataLoader(TensorDataset(x, x.prod(dim=1, keepdim=True)), batch_size=32, shuffle=True)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.9f} on {trainer.world_size} processes", flush=True)
        torch.save(model.state_dict(), Path(options.output) / "model.pt")


if __name__ == "__main__":
    main()
