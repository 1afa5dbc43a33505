"""Frozen linear layers whose weights are held in 4 bits: NF4 (Dettmers et al. 2023,
arXiv:2305.14314), with the kernels of bitsandbytes, on GPUs and CPUs.

bitsandbytes is imported when it is used, because importing it takes seconds.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_workers.training.core.errors import ModelError

BLOCK: Final = 64
"""Number of consecutive weights that share a scale."""


class Nf4Linear(nn.Module):
    """(..., inputs) -> (..., outputs), with a frozen weight. The products are computed in the type
    of the inputs or, in an autocast region, in the region's type."""

    def __init__(self, layer: nn.Linear) -> None:
        """Create an empty layer of the same size on the device of `layer`, with its bias."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        num_blocks, device = -(-layer.weight.numel() // BLOCK), layer.weight.device
        packed = torch.empty(num_blocks * BLOCK // 2, 1, dtype=torch.uint8, device=device)
        self.packed = _frozen(packed)
        """Two weights in each byte."""
        self.scales = _frozen(torch.empty(num_blocks, dtype=torch.float32, device=device))
        """Largest absolute value of each block."""
        self.bias = layer.bias

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Set the weight, (outputs, inputs)."""
        exact = weight.float() if weight.dtype == torch.float64 else weight
        flat = exact.to(self.packed.device).flatten()
        blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        packed, state = _functions().quantize_4bit(blocks, blocksize=BLOCK, quant_type="nf4")
        self.packed.copy_(packed)
        self.scales.copy_(state.absmax)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a type, (outputs, inputs)."""
        found, size = _functions(), (self.out_features, self.in_features)
        # On CPUs, bitsandbytes 0.50 returns wrong values for rows that are shorter than a block.
        shape = torch.Size((len(self.scales), BLOCK))
        state = found.QuantState(
            self.scales, shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype
        )
        blocks: Tensor = found.dequantize_4bit(self.packed, state)
        return blocks.flatten()[: size[0] * size[1]].view(size)

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        product: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """The product with the weight of a layer. The weight in the type of the inputs is computed
    again in the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.weight_in(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.weight_in(gradient.dtype), None


def quantise(lm: nn.Module) -> None:
    """Replace the frozen linear layers of a model on the meta device, in place. The output layer
    and layers that share their weight with another module stay as they are. Raises ModelError if
    there is no such layer."""
    holders: dict[Tensor, int] = {}
    for module in lm.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[parameter] = holders.get(parameter, 0) + 1
    output = lm.get_output_embeddings()  # type: ignore[operator]
    found = [
        (name, module)
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear)
        and not module.weight.requires_grad
        and holders[module.weight] == 1
        and module is not output
    ]
    if not found:
        raise ModelError(
            "model.adapter.base_precision is nf4, but the base has no linear layers that can be "
            "quantized: set it to bf16"
        )
    for name, layer in found:
        path, _, last = name.rpartition(".")
        setattr(lm.get_submodule(path), last, Nf4Linear(layer))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _functions() -> Any:
    return importlib.import_module("bitsandbytes.functional")
