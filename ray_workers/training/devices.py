"""Device operations other than computation.

torch has a module for each kind of GPU (such as `torch.cuda`), with the same interface for streams,
events, and random numbers; every device except the CPU is considered a GPU. GPU operations are
asynchronous.
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
    """Return torch's module for this kind of GPU, with its streams and events."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until all operations that were launched on the device are done."""
    if is_gpu(device):
        module_of(device).synchronize()


def arithmetic(device: torch.device) -> tuple[object, ...]:
    """Return a value that is equal on two ranks only if the same operations on their devices yield
    bitwise equal results. The order of additions depends on the number of threads."""
    if is_gpu(device):
        found = module_of(device).get_device_properties(device)
        names = ("name", "major", "minor", "multi_processor_count")
        kind = tuple(getattr(found, name, None) for name in names)
        return (torch.__version__, torch.version.cuda, device.type, *kind)
    kind = (torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads")
    return (torch.__version__, *kind)


def seed(device: torch.device, number: int) -> None:
    """Seed only the device's own generator. `torch.manual_seed` would seed the generators of all
    backends."""
    if is_gpu(device):
        module_of(device).manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device. From pinned memory, the copy is queued in the GPU's
    stream; from other memory, the caller would wait for all previously launched operations."""
    return (tensor.pin_memory() if is_gpu(device) else tensor).to(device, non_blocking=True)
