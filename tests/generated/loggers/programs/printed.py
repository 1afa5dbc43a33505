"""Numbers next to tqdm bars, in lines of logging, and in printed lines."""

from __future__ import annotations

import logging
import math
import sys
from importlib import import_module
from typing import Any

from common import Truth


def bar(truth: Truth) -> None:
    """One bar for each epoch, with a validation bar inside it."""
    tqdm: Any = import_module("tqdm").tqdm
    step = 0
    for epoch in range(3):
        shown = tqdm(range(8), desc=f"Epoch {epoch + 1}", mininterval=0)
        for _ in shown:
            step += 1
            loss = 2.0 * math.exp(-step / 9)
            shown.set_postfix(loss=f"{loss:.4f}", lr=1e-3 / step)
            truth.add("loss", step, f"{loss:.4f}")
        accuracy = 1.0 - 0.5 / (epoch + 1)
        tqdm.write(f"epoch {epoch + 1}: val_acc={accuracy:.3f}")
        truth.add("val_acc", epoch + 1, f"{accuracy:.3f}")


def logged(truth: Truth) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s:%(lineno)d - %(message)s"
    )
    logger = logging.getLogger("train.loop")
    logger.info("seed 17, device cpu, 3 workers, batch_size=32")
    for step in range(0, 100, 10):
        loss, norm = 3.0 / (step + 2), 10.0 - step / 20
        logger.info("step %d/%d loss %.4f grad_norm %.3f took 0.12 s", step, 100, loss, norm)
        truth.add("loss", step, f"{loss:.4f}")
        truth.add("grad_norm", step, f"{norm:.3f}")


def printed(truth: Truth) -> None:
    for epoch in range(1, 7):
        loss, accuracy = 0.7 / epoch, 1 - 0.4 / epoch
        print(f"Epoch [{epoch}/6], Loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%")
        truth.add("Loss", epoch, f"{loss:.4f}")
        truth.add("Accuracy", epoch, f"{100 * accuracy:.2f}")
        val = {"val_loss": 0.8 / epoch, "val_f1": accuracy}
        print(f"epoch {epoch}:", val)
        for name, value in val.items():
            truth.add(name, epoch, value)


def main(kind: str) -> None:
    truth = Truth()
    {"bar": bar, "logged": logged, "printed": printed}[kind](truth)
    truth.write()


if __name__ == "__main__":
    main(sys.argv[1])
