"""keras on torch: what `fit` prints, or what its CSVLogger writes while `fit` is silent."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from common import Truth, regression

os.environ["KERAS_BACKEND"] = "torch"
torch: Any = import_module("torch")
keras: Any = import_module("keras")


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes down the metrics of each epoch."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name, value in logs.items():
            self.truth.add(name, epoch, value)


def main(verbose: int) -> None:
    truth = Truth()
    keras.utils.set_random_seed(1)
    x, y = regression(torch)
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    written = [] if verbose else [keras.callbacks.CSVLogger("metrics.csv")]
    model.fit(
        *(x.numpy(), y.numpy()),
        epochs=5,
        batch_size=16,
        validation_split=0.25,
        verbose=verbose,
        callbacks=[*written, Callback(truth)],
    )
    truth.write()


if __name__ == "__main__":
    main(int(sys.argv[1]))
