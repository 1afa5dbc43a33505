"""lightning with a CSVLogger or a TensorBoardLogger, for each of three folds, and its bar."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from common import Truth, regression

torch: Any = import_module("torch")
lightning: Any = import_module("lightning")
loggers: Any = import_module("lightning.pytorch.loggers")


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def _loss(self, batch: Any) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(self.line(x), y)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _telling(kind: Any, truth: Truth, fold: str) -> Any:
    """The logger's class with a method that writes down what it is given."""

    class Telling(kind):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            for name, value in metrics.items():
                if name != "epoch":
                    truth.add(f"{fold}:{name}", int(step or 0), value)
            super().log_metrics(metrics, step)

    return Telling


def main(kind: str) -> None:
    truth = Truth()
    x, y = regression(torch)
    data = torch.utils.data.TensorDataset(x, y)
    for fold in range(3):
        lightning.seed_everything(fold, verbose=False)
        found = {"csv": loggers.CSVLogger, "tensorboard": loggers.TensorBoardLogger}[kind]
        logger = _telling(found, truth, f"fold{fold}")("logs", name=f"fold{fold}")
        trainer = lightning.Trainer(
            max_epochs=3,
            logger=logger,
            log_every_n_steps=2,
            enable_checkpointing=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        training = torch.utils.data.DataLoader(data, 8, shuffle=True)
        trainer.fit(Model(), training, torch.utils.data.DataLoader(data, 16))
    truth.write()


if __name__ == "__main__":
    main(sys.argv[1])
