"""Running a trained model on what it was given, piece by piece and on its own device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ray_workers.training.core.workload import at_least_float32

BATCH_SIZE = 256
"""Samples that are computed together."""


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs for all inputs, on the CPU: float32, or float64 if the model's are."""
    device = device_of(model)
    pieces = [
        at_least_float32(model(piece.to(device))).cpu() for piece in torch.split(inputs, BATCH_SIZE)
    ]
    return torch.cat(pieces)


def chances_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """float64 probabilities of the classes, along the second dimension: float32 would round those
    near 1 to it, and so make different samples equal."""
    return outputs_of(model, inputs).double().softmax(dim=1)
