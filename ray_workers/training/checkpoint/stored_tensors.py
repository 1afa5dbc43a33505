"""Tensors whose values stay in the files of a checkpoint until they are copied.

A `StoredTensor` has the shape and the type of a whole tensor, whose pieces can be in several files.
A copy of the tensor, or of a slice of it, reads only the elements that are copied. Therefore each
rank reads only its part of a state, and a model is loaded without a second copy in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dray.train.prepared.copies import changed
from ray_workers.training.checkpoint.safetensors_layout import TORCH_DTYPES
from ray_workers.training.core import compat_torch

READ_BYTES = 32 << 20
"""Maximum number of bytes that are read at a time, except that at least one row is read."""

Read = Callable[[int, int], Tensor]
"""A function that maps (start, number of bytes) to these bytes of a file, as a tensor of uint8."""


def mapped(path: Path, num_bytes: int) -> Read:
    """Map a file into memory, which ranks on the same node share. Raises RuntimeError if the file
    is missing or too short."""
    content = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    return lambda start, length: content[start : start + length]


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor, or a complete tensor, in a file."""

    read: Read
    start: int
    """Offset in bytes from the beginning of the file."""
    offsets: Sequence[int]
    """Index of the first element in the whole tensor, per dimension."""
    shape: Sequence[int]

    def copy_to(self, target: Tensor, offsets: Sequence[int], dtype: torch.dtype) -> int:
        """Copy the elements that are in this piece to `target`, whose first element has the index
        `offsets` in the whole tensor. Return the number of copied elements."""
        if not self.shape:
            target.copy_(self.read(self.start, dtype.itemsize).view(dtype)[0])
            return 1
        rows = [0, 0]
        for dim, (own, size, first) in enumerate(
            zip(self.offsets, self.shape, offsets, strict=True)
        ):
            start = max(own, first)
            stop = min(own + size, first + target.shape[dim])
            if start >= stop:
                return 0
            target = target.narrow(dim, start - first, stop - start)
            if dim == 0:
                rows = [start - own, stop - own]
        _, *row = self.shape
        row_bytes = dtype.itemsize * math.prod(row)
        num_at_once = max(1, READ_BYTES // row_bytes)
        for start in range(rows[0], rows[1], num_at_once):
            num = min(num_at_once, rows[1] - start)
            part = self.read(self.start + start * row_bytes, num * row_bytes)
            part = part.view(dtype).view(num, *row)
            for dim, (own, first) in enumerate(zip(self.offsets, offsets, strict=True)):
                if dim:
                    part = part.narrow(dim, max(own, first) - own, target.shape[dim])
            target.narrow(0, start - rows[0], num).copy_(part)
        return target.numel()


class StoredTensor(Tensor):
    """A tensor on the CPU, or a slice of one, without memory for its values. Operations that only
    read work as usual; operations that would change the tensor raise RuntimeError."""

    _name: str
    _pieces: Sequence[StoredPiece]
    _offsets: tuple[int, ...]
    """Index of the first element in the whole tensor, per dimension."""

    @staticmethod
    def __new__(
        cls,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        pieces: Sequence[StoredPiece],
        offsets: Sequence[int],
    ) -> Self:
        made = compat_torch.tensor_without_values(cls, shape, dtype)
        made._name, made._pieces, made._offsets = name, pieces, tuple(offsets)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self._name!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first, *rest = args
        if isinstance(first, cls) and compat_torch.changes_a_tensor(func):
            raise RuntimeError(f"{first!r} is in a file: change a clone of the tensor instead")
        match func:
            case torch.ops.aten.detach.default:
                return first._part(0, 0, None)
            case torch.ops.aten.slice.Tensor if len(rest) == 3:
                return first._part(*rest)
            case torch.ops.aten.copy_.default if first.shape == rest[0].shape:
                rest[0]._copy_to(first)
                return first

        def read(one: Any) -> Any:
            return one._read() if isinstance(one, cls) else one

        return func(*changed(tuple(args), read), **changed(kwargs or {}, read))

    def _part(self, dim: int, start: int | None, stop: int | None) -> StoredTensor:
        shape, offsets = list(self.shape), list(self._offsets)
        if shape:
            first, end, _ = slice(start, stop).indices(shape[dim])
            shape[dim] = max(0, end - first)
            offsets[dim] += first
        return StoredTensor(self._name, self.dtype, shape, self._pieces, offsets)

    def _copy_to(self, target: Tensor) -> None:
        num = sum(piece.copy_to(target, self._offsets, self.dtype) for piece in self._pieces)
        assert num == self.numel(), f"{self!r} has {num} elements in the files"

    def _read(self) -> Tensor:
        found = torch.empty(self.shape, dtype=self.dtype)
        self._copy_to(found)
        return found


def stored_tensors(index: Mapping[str, Any], files: Mapping[str, Read]) -> dict[str, Tensor]:
    """Return the tensors that an index describes; the keys of `files` are names of files. Raises
    LookupError, TypeError or ValueError if the index is malformed, or if the pieces of a tensor do
    not have all its elements."""
    found: dict[str, Tensor] = {}
    for name, entry in index.items():
        dtype, shape = TORCH_DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
        pieces = [
            StoredPiece(files[file], int(start), list(map(int, offsets)), list(map(int, part)))
            for file, start, offsets, part in entry["pieces"]
        ]
        for piece in pieces:
            ends = [at + size for at, size in zip(piece.offsets, piece.shape, strict=True)]
            bounds = zip(piece.offsets, ends, shape, strict=True)
            if not all(0 <= at <= end <= size for at, end, size in bounds):
                raise ValueError(f"a piece of {name} is not within the tensor")
        if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
            raise ValueError(f"the pieces of {name} do not have all elements of the tensor")
        found[name] = StoredTensor(name, dtype, shape, pieces, [0] * len(shape))
    return found
