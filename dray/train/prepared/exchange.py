"""The exchange of gradients: averaged over the global batch when a backward pass has ended.

All gradients of a type travel in one flat tensor. With them go rank 0's buffers, as DDP sends them,
and for each parameter whether a rank has a gradient of it, so that one that had no part in the
step anywhere keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class GradientExchange:
    """Averages the gradients of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError("prepare() was given a model without a parameter to train")
        self.device = self._parameters[0].device
        self._buffers = list(model.buffers())
        # The presence of gradients travels as float32, whichever type they have themselves.
        self._by_type: dict[torch.dtype, tuple[list[nn.Parameter], list[Tensor]]]
        self._by_type = {torch.float32: ([], [])}
        for parameter in self._parameters:
            self._by_type.setdefault(parameter.dtype, ([], []))[0].append(parameter)
        self._plain: list[Tensor] = []
        """Buffers that travel as bytes."""
        for buffer in self._buffers:
            if buffer.dtype in self._by_type and buffer.dtype in _SUMMED:
                self._by_type[buffer.dtype][1].append(buffer)
            else:
                self._plain.append(buffer)

    @torch.no_grad()
    def run(self, weight: float, rank: int) -> list[Tensor]:
        """The sum over the ranks of each one's gradients times its weight, flat. A collective; the
        gradients themselves stay as they are."""
        flats = []
        for dtype, (parameters, buffers) in self._by_type.items():
            sizes = self._sizes(dtype)
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            parts = iter(torch.split(flat, sizes))
            if dtype is torch.float32:
                next(parts).copy_(self._presence())
            for parameter in parameters:
                part = next(parts)
                if parameter.grad is None:
                    part.zero_()
                else:
                    torch.mul(parameter.grad.reshape(-1), weight, out=part)
            for buffer in buffers:
                part = next(parts)
                _ = part.copy_(buffer.reshape(-1)) if rank == 0 else part.zero_()
            flats.append(flat)
        if self._plain:
            bytes_of = [_bytes_of(buffer) for buffer in self._plain]
            flat = torch.cat(bytes_of)
            flats.append(flat if rank == 0 else torch.zeros_like(flat))
        for flat in flats:
            dist.all_reduce(flat)
        return flats

    def _sizes(self, dtype: torch.dtype) -> list[int]:
        """Elements of the parts of a type's flat tensor."""
        parameters, buffers = self._by_type[dtype]
        own = [each.numel() for each in (*parameters, *buffers)]
        return [len(self._parameters), *own] if dtype is torch.float32 else own

    def _presence(self) -> Tensor:
        has_one = [p.grad is not None for p in self._parameters]
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ValueError("prepare() does not exchange sparse gradients: use sparse=False")
        return torch.tensor(has_one, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def apply(self, flats: Sequence[Tensor]) -> None:
        """Give the parameters the gradients of the global batch, and the buffers rank 0's
        values."""
        has_one: dict[int, float] = {}
        remaining = iter(flats)
        for dtype, (parameters, buffers) in self._by_type.items():
            parts = iter(torch.split(next(remaining), self._sizes(dtype)))
            if dtype is torch.float32:
                presence = next(parts).tolist()
                has_one = dict(zip(map(id, self._parameters), presence, strict=True))
            for parameter in parameters:
                part = next(parts).view_as(parameter)
                if not has_one[id(parameter)]:
                    continue
                if parameter.grad is None:
                    parameter.grad = part.clone()
                else:
                    parameter.grad.copy_(part)
            for buffer in buffers:
                buffer.copy_(next(parts).view_as(buffer))
        if self._plain:
            flat = next(remaining)
            sizes = [buffer.nbytes for buffer in self._plain]
            for buffer, part in zip(self._plain, torch.split(flat, sizes), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))

    def gradients(self) -> list[Tensor | None]:
        """Copies of the gradients; None where there is none."""
        return [None if p.grad is None else p.grad.clone() for p in self._parameters]

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    @torch.no_grad()
    def zero_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def buffers(self) -> list[Tensor]:
        """Copies of the buffers."""
        return [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def set_buffers(self, buffers: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, buffers, strict=True):
            buffer.copy_(value)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
