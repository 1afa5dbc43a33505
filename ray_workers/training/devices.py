"""Calls to a device besides computing on it.

For each kind of GPU torch has a module (`torch.cuda`) with the same streams, events and random
numbers; every device but the CPU counts as a GPU. Operations on a GPU end later than their call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def is_gpu(device: torch.device) -> bool:
    return device.type != CPU.type


def on_gpu(tensor: Tensor) -> bool:
    return is_gpu(tensor.device)


def module_of(device: torch.device) -> Any:
    """torch's module for the kind of GPU, with its streams and events."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Return when everything that was launched on the device is done."""
    if is_gpu(device):
        module_of(device).synchronize()


def seed(device: torch.device, number: int) -> None:
    """Seed only the generator that is drawn from: `torch.manual_seed` visits every backend."""
    if is_gpu(device):
        module_of(device).manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, on a device. From pinned memory the copy takes its turn in the GPU's
    stream; from any other the caller would wait for all that was launched before."""
    return (tensor.pin_memory() if is_gpu(device) else tensor).to(device, non_blocking=True)
