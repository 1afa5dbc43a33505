"""Which samples are kept on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_workers.training.data import device_dataset
from ray_workers.training.data.device_dataset import (
    InMemorySamples,
    MemoryMappedSamples,
    Rows,
    Samples,
)

CPU = torch.device("cpu")
ROWS = np.arange(30)[::-1].copy()


def fetch(rows: Rows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).float()[:, None], torch.from_numpy(rows)


def test_a_split_that_is_small_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(device_dataset.on_device(Samples(ROWS, fetch), CPU), InMemorySamples)
    monkeypatch.setattr(device_dataset, "RESIDENT_BYTES", 100)
    assert isinstance(device_dataset.on_device(Samples(ROWS, fetch), CPU), MemoryMappedSamples)
