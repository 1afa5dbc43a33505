"""Tensors that ranks hold together, and the plain tensor that is this rank's part of one.

What works on each element by itself is better done with the plain tensor: torch has to find out how
the result of an operator on a DTensor is divided, which for the first time on a mesh of three axes
takes from milliseconds to seconds.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """The part of a tensor with the parameter's shape that a rank has, as torch knows parts."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def part_of(whole: Tensor, like: Tensor | None) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as `like` is divided."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    there = whole.detach().to(like.device, like.dtype)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)
