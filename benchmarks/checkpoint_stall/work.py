"""The model that is trained and saved, a perceptron whose state has a given size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import nn

BYTES_PER_PARAMETER: Final = 12
"""The parameter and AdamW's two moments, in fp32."""


@dataclass(frozen=True)
class Work:
    name: str
    width: int
    num_layers: int
    batch_size: int
    """Samples per rank."""
    saves_per_round: int

    def model(self) -> nn.Module:
        layers = [nn.Linear(self.width, self.width) for _ in range(self.num_layers)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))

    @property
    def state_bytes(self) -> int:
        return BYTES_PER_PARAMETER * self.num_layers * (self.width + 1) * self.width


WORKS: Final = {
    work.name: work
    for work in (
        Work("50 MB", 1024, num_layers=4, batch_size=128, saves_per_round=4),
        Work("500 MB", 2048, num_layers=10, batch_size=64, saves_per_round=2),
    )
}
