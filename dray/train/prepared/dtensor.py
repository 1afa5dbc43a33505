"""Tensors that are divided among ranks, and plain tensors with this rank's part.

Elementwise operators are applied to the plain tensors. For a DTensor, torch has to derive how the
result is divided, which takes milliseconds to seconds the first time on a mesh with three axes.

If FSDP is applied to a model whose matrices are already divided, one dimension is cut twice: first
along the tensor axis, and then each resulting part is cut along the axes of FSDP. If the length of
the dimension is not divisible by the number of parts, torch's DTensor and FSDP disagree about the
positions of the parts, both when distributing and when reassembling a tensor (torch 2.13). This
module uses the same positions as FSDP.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dray.train.prepared.compat_torch import StridedShard


class Cut(NamedTuple):
    """One division of a tensor, into `parts` parts of equal size, except that the last parts can
    be smaller."""

    axis: int
    """Mesh axis along which the parts are distributed."""
    dim: int
    parts: int
    number: int
    """Index of this rank's part."""

    def bounds(self, length: int, number: int) -> tuple[int, int]:
        """Return (start, stop) of a part, according to the rule of `torch.chunk`."""
        size = -(-length // self.parts)
        return min(number * size, length), min((number + 1) * size, length)


class Apart(NamedTuple):
    """A part that is on a different device than its parameter. A DTensor can't represent such a
    part."""

    part: Tensor
    parameter: DTensor

    def brought(self) -> Tensor:
        """Copy the part to the parameter's device, and return it as a DTensor."""
        return like(self.part.to(self.parameter.device), self.parameter)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory with the tensor. A plain tensor is returned
    unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return the complete tensor, which a collective gathers if the tensor is divided."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """Wrap this rank's part as a DTensor with the parameter's shape and placements."""
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


def part_of(whole: Tensor, parameter: Tensor | None) -> Tensor:
    """Return this rank's part of a tensor that is complete on every rank. The tensor is divided in
    the same way as the parameter."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    part = plain_part_of(whole, parameter)
    own = torch.empty(part.shape, dtype=parameter.dtype, device=parameter.device)
    return like(own.copy_(part), parameter)


def plain_part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a complete tensor, as a plain view of it."""
    part = whole.detach()
    if isinstance(parameter, DTensor):
        for dim, (start, length) in enumerate(zip(*box_of(parameter), strict=True)):
            part = part.narrow(dim, start, length)
    return part


def box_of(divided: DTensor) -> tuple[list[int], list[int]]:
    """Return the position of this rank's part in the whole tensor: (index of the first element,
    shape of the part)."""
    offsets, shape = [0] * divided.ndim, list(divided.shape)
    for cut in cuts_of(divided):
        start, stop = cut.bounds(shape[cut.dim], cut.number)
        offsets[cut.dim] += start
        shape[cut.dim] = stop - start
    return offsets, shape


def cuts_of(divided: DTensor) -> list[Cut]:
    """Return the cuts in the order in which they are made: the cut that creates a part precedes the
    cuts of this part."""
    mesh = divided.device_mesh
    plain: list[Cut] = []
    of_parts: list[Cut] = []
    for axis, placement in enumerate(divided.placements):
        if isinstance(placement, Shard | StridedShard):
            cut = Cut(axis, placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
            (of_parts if isinstance(placement, StridedShard) else plain).append(cut)
    return plain + of_parts
