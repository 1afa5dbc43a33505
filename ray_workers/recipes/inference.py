"""Functions that recipes share to compute the outputs and the pixel inputs of a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_workers.datasets import Images, MaskedImages
from ray_workers.recipes.models.images import Shape
from ray_workers.training.core.workload import at_least_float32
from ray_workers.training.data.device_dataset import Rows

BATCH_SIZE = 256
"""Number of samples to compute at a time."""


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the model's outputs for all inputs, on the CPU: float32, or float64 for a float64
    model."""
    device = device_of(model)
    pieces = [
        at_least_float32(model(piece.to(device))).cpu() for piece in torch.split(inputs, BATCH_SIZE)
    ]
    return torch.cat(pieces)


def chances_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return float64 probabilities of the classes, along the second dimension. In float32,
    probabilities near 1 would be rounded to 1, so that different samples could not be
    distinguished."""
    return outputs_of(model, inputs).double().softmax(dim=1)


def scaled(images: Images | MaskedImages, at: Rows) -> Tensor:
    """Return the images as float32 (B, channels, height, width), in 0..1."""
    pixels = torch.from_numpy(np.take(images.pixels, at, axis=0)).to(torch.float32)
    return pixels.div_(images.max_value)


def described(shape: Shape, classes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the result's `config.json` that describe images."""
    return {
        "input_shape": list(shape),
        "input_range": [0.0, 1.0],
        "num_classes": len(classes),
        "labels": list(classes),
    }
