"""Running a trained model on what it was given, piece by piece and on its own device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH_SIZE = 256
"""Samples that are computed together."""


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs for all inputs, on the CPU."""
    device = device_of(model)
    pieces = [model(piece.to(device)).float().cpu() for piece in torch.split(inputs, BATCH_SIZE)]
    return torch.cat(pieces)


def chances_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Probabilities of the classes, along the second dimension."""
    return outputs_of(model, inputs).softmax(dim=1)
