"""The common part of recipes on images: pixels become tensors, and results describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_workers.datasets import Images, MaskedImages
from ray_workers.recipes.models.images import Shape
from ray_workers.training.data.device_dataset import Rows


def scaled(images: Images | MaskedImages, at: Rows) -> Tensor:
    """float32 (B, channels, height, width), in 0..1."""
    pixels = torch.from_numpy(np.take(images.pixels, at, axis=0)).to(torch.float32)
    return pixels.div_(images.max_value)


def described(shape: Shape, classes: Sequence[str]) -> dict[str, Any]:
    """The fields of the result's `config.json` about images."""
    return {
        "input_shape": list(shape),
        "input_range": [0.0, 1.0],
        "num_classes": len(classes),
        "labels": list(classes),
    }
