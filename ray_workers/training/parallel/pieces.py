"""The pieces of a divided state: where they are in the whole tensors, and which rank writes each of
them to a checkpoint.

Each rank knows from its position in the mesh which other ranks hold the same pieces. The ranks that
hold a piece apply the same rule to the same tensors, so they agree on its writer without
communicating.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dray.train.prepared.dtensor import Apart, box_of, cuts_of, local

SPLIT_FROM_BYTES = 1 << 20
"""A tensor with at least this number of bytes is written in parts, one by each rank that holds the
tensor. A smaller tensor is written by one rank."""


class Piece(NamedTuple):
    """A part of a tensor, or a complete tensor."""

    tensor: Tensor | None
    """None if another rank writes the tensor, or if no element is in this piece."""
    offsets: tuple[int, ...]
    """Index of the first element of the piece in the whole tensor, per dimension."""
    whole: torch.Size
    """Shape of the whole tensor."""


class Spread:
    """Divides the writing of equal pieces evenly among the ranks that hold them."""

    def __init__(self, positions: Mapping[str, tuple[int, int]]) -> None:
        """positions: for each axis of the mesh, (number of ranks, index of this rank)."""
        self._positions = positions
        self._written: dict[tuple[str, ...], list[int]] = {}
        """For the ranks along the axes, in order: the number of bytes that each of them writes."""

    def pieces(
        self, state: Any, *, divided: Collection[str] = (), of_first: Collection[int] = ()
    ) -> Any:
        """Replace each tensor in a nested state with the `Piece` that this rank writes.

        divided: the axes along which ranks have different plain tensors. of_first: addresses of
        tensors that can differ between ranks; the first rank writes them.
        """
        if isinstance(state, Mapping):
            # Ranks with the same pieces can have them in a different order.
            made = {
                key: self.pieces(state[key], divided=divided, of_first=of_first)
                for key in sorted(state, key=str)
            }
            return {key: made[key] for key in state}
        if isinstance(state, Apart):
            return self._piece(state.part, state.parameter, divided)
        if isinstance(state, Tensor):
            own = local(state.detach())
            is_of_first = own.data_ptr() in of_first
            return self._piece(own, state, divided, is_of_first=is_of_first)
        if isinstance(state, list | tuple):
            return type(state)(
                [self.pieces(one, divided=divided, of_first=of_first) for one in state]
            )
        return state

    def _piece(
        self,
        own: Tensor,
        tensor: Tensor,
        divided: Collection[str],
        *,
        is_of_first: bool = False,
    ) -> Piece:
        whole, offsets = tensor.shape, [0] * tensor.ndim
        if isinstance(tensor, DTensor):
            offsets, shape = box_of(tensor)
            assert list(own.shape) == shape, f"{list(own.shape)} is not {shape}"
            names = tensor.device_mesh.mesh_dim_names or ()
            divided = {*divided, *(names[cut.axis] for cut in cuts_of(tensor))}
        shared = tuple(axis for axis in self._positions if axis not in divided)
        num, number = 1, 0
        for axis in shared:
            size, at = self._positions[axis]
            num, number = num * size, number * size + at
        if is_of_first:
            is_mine = number == 0
        elif own.nbytes >= SPLIT_FROM_BYTES and max(own.shape) >= num:
            dim = own.shape.index(max(own.shape))
            start, stop = (own.shape[dim] * n // num for n in (number, number + 1))
            own, is_mine = own.narrow(dim, start, stop - start), True
            offsets[dim] += start
        else:
            written = self._written.setdefault(shared, [0] * num)
            writer = written.index(min(written))
            written[writer] += own.nbytes
            is_mine = writer == number
        is_empty = own.numel() == 0 and whole.numel() > 0
        return Piece(own if is_mine and not is_empty else None, tuple(offsets), whole)
