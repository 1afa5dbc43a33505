"""Code shared by the recorded programs: a small model, a data set, and the truth file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class Truth:
    """The numbers passed to a logger, in order, by series."""

    def __init__(self) -> None:
        self.series: dict[str, list[tuple[int, float]]] = {}

    def add(self, key: str, step: int, value: Any) -> None:
        number = float(value)
        assert math.isfinite(number)
        self.series.setdefault(key, []).append((step, number))

    def write(self) -> None:
        Path("truth.json").write_text(json.dumps(self.series))


def regression(torch: Any, num_samples: int = 64) -> tuple[Any, Any]:
    """(x, y) of a linear rule with noise."""
    torch.manual_seed(0)
    x = torch.randn(num_samples, 4)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * torch.randn(num_samples, 1)
