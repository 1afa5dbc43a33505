"""Tensors whose values stay in the files of a checkpoint until they are copied.

A `StoredTensor` has the shape and the type of a whole tensor, whose pieces can be in several files.
A copy of the tensor, or of a slice of it, reads only the elements that are copied. Therefore each
rank reads only its part of a state, and a model is loaded without a second copy in memory.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dray.train.prepared.copies import changed
from ray_workers.training.checkpoint.safetensors_layout import TORCH_DTYPES
from ray_workers.training.core import compat_torch

READ_BYTES = 32 << 20
"""Maximum number of bytes that are read at a time, except that at least one row is read."""
MAX_CUT_DIMS = 8
"""Maximum number of dimensions in which a tensor can be cut."""

Read = Callable[[int, int], Tensor]
"""A function that maps (start, number of bytes) to these bytes of a file, as a tensor of uint8."""


class StoredFile(NamedTuple):
    read: Read
    num_bytes: int


def mapped(path: Path, num_bytes: int) -> Read:
    """Map a file into memory, which ranks on the same node share. Raises OSError if the file can't
    be read, and ValueError if it has another size."""
    found = path.stat().st_size
    if found != num_bytes:
        raise ValueError(f"{path} has {found} bytes instead of {num_bytes}")
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
    """A tensor on the CPU, or a slice of one, without memory for its values. Read-only operations
    work as usual; operations that would change the tensor raise RuntimeError."""

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
            raise RuntimeError(
                f"{first!r} is in a file and can't be changed: change a clone of it instead"
            )
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


def stored_tensors(index: Mapping[str, Any], files: Mapping[str, StoredFile]) -> dict[str, Tensor]:
    """Return the tensors that an index describes; the keys of `files` are names of files. Raises
    LookupError, TypeError, ValueError or OverflowError if the index is malformed, a piece is not
    within its file, or the pieces of a tensor do not contain each element exactly once."""
    found: dict[str, Tensor] = {}
    for name, entry in index.items():
        dtype, shape = TORCH_DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
        pieces = []
        for file, start, offsets, part in entry["pieces"]:
            sizes = list(map(int, part))
            piece = StoredPiece(files[file].read, int(start), list(map(int, offsets)), sizes)
            end = piece.start + dtype.itemsize * math.prod(sizes)
            if (
                min([piece.start, *sizes, *piece.offsets]) < 0
                or end > files[file].num_bytes
                or piece.start % dtype.itemsize
            ):
                raise ValueError(f"a piece of {name} is not within {file}")
            pieces.append(piece)
        if not _are_whole(pieces, shape):
            raise ValueError(f"the pieces of {name} do not contain each element exactly once")
        found[name] = StoredTensor(name, dtype, shape, pieces, [0] * len(shape))
    return found


def _are_whole(pieces: Sequence[StoredPiece], shape: Sequence[int]) -> bool:
    """Return whether every element of a tensor is in exactly one piece.

    The number of pieces that contain an element is the sum of the signs of all piece corners that
    are not behind this element. Therefore, pieces that contain the same elements have the same sums
    of signs at all corners.
    """
    whole = StoredPiece(torch.empty, 0, [0] * len(shape), shape)
    if any(len(one.offsets) != len(shape) or len(one.shape) != len(shape) for one in pieces):
        return False
    if 0 in shape:
        return True
    dims = [
        dim
        for dim, size in enumerate(shape)
        if any((one.offsets[dim], one.shape[dim]) != (0, size) for one in pieces)
    ]
    return len(dims) <= MAX_CUT_DIMS and _corners(pieces, dims) == _corners([whole], dims)


def _corners(pieces: Sequence[StoredPiece], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Return the sum of the signs at each corner in these dimensions, and omit sums that are zero.
    The sign is negative if an odd number of the corner's indices are the ends of the piece."""
    signs: Counter[tuple[int, ...]] = Counter()
    for piece in pieces:
        for ends in itertools.product((0, 1), repeat=len(dims)):
            corner = (
                piece.offsets[dim] + end * piece.shape[dim]
                for dim, end in zip(dims, ends, strict=True)
            )
            signs[tuple(corner)] += -1 if sum(ends) % 2 else 1
    return {corner: sign for corner, sign in signs.items() if sign}
