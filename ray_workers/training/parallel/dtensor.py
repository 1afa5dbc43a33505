"""Tensors that ranks hold together, and the plain tensor that is this rank's part of one.

Operators that work on each element by itself are given the plain tensor: for a DTensor torch has to
find out how the result is divided, which for the first time on a mesh of three axes takes from
milliseconds to seconds.

FSDP over a model whose matrices are divided cuts one dimension twice: first by the tensor axis,
then each of these parts. Where that does not come out even, torch's DTensor takes the parts to be
in other places than FSDP has them, when it distributes a tensor and when it puts one together
(torch 2.13); here they are where FSDP has them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ray_workers.training.core.compat_torch import StridedShard


class Cut(NamedTuple):
    """One of several cuts of a tensor: into so many parts of one size, the last ones smaller."""

    axis: int
    """The axis of the mesh along which the parts are."""
    dim: int
    parts: int
    number: int
    """Of this rank's part."""

    def bounds(self, length: int, number: int) -> tuple[int, int]:
        """[start, stop) of a part, as `torch.chunk` cuts."""
        size = -(-length // self.parts)
        return min(number * size, length), min((number + 1) * size, length)


class Apart(NamedTuple):
    """A part on another device than its parameter, where no DTensor could have it."""

    part: Tensor
    parameter: DTensor

    def brought(self) -> Tensor:
        """The part on the parameter's device, as a DTensor."""
        return like(self.part.to(self.parameter.device), self.parameter)


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


def part_of(whole: Tensor, parameter: Tensor | None) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as the parameter is divided."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    part = whole.detach()
    for cut in cuts_of(parameter):
        start, stop = cut.bounds(part.shape[cut.dim], cut.number)
        part = part.narrow(cut.dim, start, stop - start)
    own = torch.empty(part.shape, dtype=parameter.dtype, device=parameter.device)
    return like(own.copy_(part), parameter)


def whole_of(divided: DTensor) -> Tensor:
    """The whole tensor, on every rank. A collective."""
    cuts = cuts_of(divided)
    if len({cut.dim for cut in cuts}) == len(cuts):
        return divided.full_tensor()
    length = list(divided.shape)
    lengths = []
    for cut in cuts:
        lengths.append(length[cut.dim])
        start, stop = cut.bounds(length[cut.dim], cut.number)
        length[cut.dim] = stop - start
    found = divided.to_local().contiguous()
    while cuts:
        found = _put_together(found, cuts.pop(), lengths.pop(), divided)
    return found


def _put_together(part: Tensor, cut: Cut, length: int, divided: DTensor) -> Tensor:
    """The tensor that was cut, from the parts of every rank along the axis."""
    padded = list(part.shape)
    padded[cut.dim] = -(-length // cut.parts)
    mine = part.new_zeros(padded)
    mine.narrow(cut.dim, 0, part.shape[cut.dim]).copy_(part)
    parts = [torch.empty_like(mine) for _ in range(cut.parts)]
    dist.all_gather(parts, mine, group=divided.device_mesh.get_group(cut.axis))
    sizes = [stop - start for start, stop in (cut.bounds(length, n) for n in range(cut.parts))]
    return torch.cat(
        [each.narrow(cut.dim, 0, size) for each, size in zip(parts, sizes, strict=True)], cut.dim
    )


def cuts_of(divided: DTensor) -> list[Cut]:
    """In the order in which they are made: those of a part come after the one that made it."""
    mesh = divided.device_mesh
    plain: list[Cut] = []
    of_parts: list[Cut] = []
    for axis, placement in enumerate(divided.placements):
        if isinstance(placement, Shard | StridedShard):
            cut = Cut(axis, placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
            (of_parts if isinstance(placement, StridedShard) else plain).append(cut)
    return plain + of_parts
