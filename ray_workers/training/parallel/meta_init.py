"""The numbers that a model begins with: the same for the same seed, however it is divided.

A model is described without numbers, on torch's meta device. Each of its modules draws its own from
a generator seeded by (seed, the module's name), whole, and a rank keeps of them the part that it
holds; so no rank ever has more of the whole than one module.
"""

from __future__ import annotations

import torch
from torch import nn

from ray_workers.training.core import compat_torch
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.parallel.dtensor import local, part_of


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give parameters that are on the meta device their numbers, on `device`, in place.

    Every module that has parameters of its own draws them in its `reset_parameters`, and fills what
    buffers it has on the meta device. Other buffers have their numbers already.

    A model of the user's own, which has its numbers already, is only moved.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
        return
    kept = {
        name: buffer.to(device, copy=True)
        for name, buffer in model.named_buffers()
        if not buffer.is_meta
    }
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.copy_(kept[name])
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            drawn = _drawn(module, own, derive_seed("model", seed, name))
            for key, parameter in own.items():
                local(parameter).copy_(local(part_of(drawn[key], parameter)))


def _drawn(module: nn.Module, own: dict[str, nn.Parameter], seed: int) -> dict[str, nn.Parameter]:
    drawn = {key: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for key, p in own.items()}
    kept = compat_torch.replace_parameters(module, drawn)
    torch.default_generator.manual_seed(seed)
    try:
        module.reset_parameters()  # type: ignore[operator]
    finally:
        compat_torch.replace_parameters(module, kept)
    return drawn
