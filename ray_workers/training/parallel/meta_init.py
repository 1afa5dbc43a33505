"""Initializes the values of a model. The values depend only on the seed, not on how the model is
divided. A model is first created without values, on torch's meta device. Then each module draws all
its values from a generator seeded by (seed, module name), and each rank keeps its part of the
values. Therefore, a rank never holds more than one complete module.

A pretrained model reads its values from files instead; each rank reads only its part.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dray.train.prepared.dtensor import local, part_of
from ray_workers.training.core import compat_torch
from ray_workers.training.data.sampler import derive_seed


@runtime_checkable
class HasStoredValues(Protocol):
    """A model whose values are stored in files."""

    def read_values(self, device: torch.device, seed: int) -> None:
        """Replace all parameters, which are on the meta device, with this rank's parts of the
        stored values, on `device`. Values that are not stored are drawn in the same way as in
        `materialise`."""


@torch.no_grad()
def materialise(
    model: nn.Module, device: torch.device, seed: int, *, is_replaced: bool = False
) -> None:
    """Replace parameters on the meta device with initialised parameters on `device`, in place.

    Every module with its own parameters draws them in `reset_parameters`, which also fills buffers
    that are on the meta device. Other buffers already have values.

    is_replaced: whether all parameters are replaced before they are used, so that they are only
        drawn if their module has such buffers.

    A user's own model already has values, so it is only moved to `device`. A model that has stored
    values reads them.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
        return
    if isinstance(model, HasStoredValues):
        model.read_values(device, seed)
        return
    drawn = {
        name
        for name, module in model.named_modules()
        if not is_replaced or any(buffer.is_meta for buffer in module.buffers(recurse=False))
    }
    empty(model, device)
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and name in drawn:
            draw(module, own, derive_seed("model", seed, name))


@torch.no_grad()
def empty(model: nn.Module, device: torch.device) -> None:
    """Give the parameters memory on `device`, without values, and move the buffers there."""
    kept = {
        name: buffer.to(device, copy=True)
        for name, buffer in model.named_buffers()
        if not buffer.is_meta
    }
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.copy_(kept[name])


@torch.no_grad()
def draw(module: nn.Module, own: dict[str, nn.Parameter], seed: int) -> None:
    """Initialise the module's own parameters with `reset_parameters`, and keep this rank's
    parts."""
    drawn = _drawn(module, own, seed)
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
