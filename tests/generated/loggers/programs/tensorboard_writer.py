"""The writer of TensorBoard itself, whose scalars are tensors."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from common import Truth

summary: Any = import_module("tensorboard.summary")


def main() -> None:
    truth = Truth()
    for run in ("a", "b"):
        writer = summary.Writer(f"runs/seed-{run}")
        for step in range(12):
            for key, value in (("loss", math.exp(-step / 5)), ("train/gain", step * 1.5 - 7)):
                writer.add_scalar(key, value + (run == "b"), step)
                truth.add(f"seed-{run}:{key}", step, value + (run == "b"))
        writer.close()
    truth.write()


if __name__ == "__main__":
    main()
