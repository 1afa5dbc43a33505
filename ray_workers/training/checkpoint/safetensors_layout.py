"""The layout of a saved state in a file. This module reads files, but does not write them.

A state is a tree of dicts, lists, and tuples, with tensors and plain values as leaves. The tensors
of a state are stored in a safetensors file, which other programs can read. The rest of the state,
including the position of each tensor, is stored in a JSON document. Reading a checkpoint does not
execute code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ray_workers.training.parallel.pieces import Piece

PAGE_BYTES = 4096
"""The data start at a multiple of this number of bytes, so that memory can be written without
another copy."""

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors."""


TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class TaggedValue:
    """A value of a script's state, as described by `tagged_values`."""

    kind: str
    content: Any


@dataclass(frozen=True)
class PickledValue:
    """A value of a restored state, which an earlier version of dray has pickled."""

    pickle: Tensor
    """The pickle, as a tensor of uint8."""


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor, or of a piece of it, in the file."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Offset in bytes from the beginning of the file."""
    offsets: tuple[int, ...]
    """Index of the first element in the whole tensor, per dimension."""
    whole: torch.Size
    """Shape of the whole tensor."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A safetensors file without the contents of the tensors."""

    header: bytes
    locations: Sequence[TensorLocation]
    """Locations in the order of the tensors for which the layout was created."""
    num_bytes: int
    """Size of the entire file."""


def flatten(state: Mapping[str, Any]) -> tuple[Any, dict[str, Piece]]:
    """Return (tree, pieces): a tree that can be serialised as JSON and contains names in place of
    tensors, and the tensors or pieces of tensors, keyed by these names. Pieces without a tensor are
    named only in the tree."""
    pieces: dict[str, Piece] = {}
    tree = _encode(state, "", pieces)
    return tree, {name: piece for name, piece in pieces.items() if piece.tensor is not None}


def restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that was flattened. Raises LookupError, TypeError or ValueError for a tree
    that `flatten` did not create."""
    if not isinstance(tree, Mapping):
        if tree is not None and not isinstance(tree, bool | int | float | str):
            raise ValueError(
                "expected a dictionary, a number, a string, a boolean or null, but found a "
                f"{type(tree).__name__}"
            )
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: restore(value, tensors) for key, value in content}
        case "list":
            return [restore(value, tensors) for value in content]
        case "tuple":
            return tuple(restore(value, tensors) for value in content)
        case "tagged":
            name, value = content
            return TaggedValue(str(name), restore(value, tensors))
        case "pickled":
            return PickledValue(*(restore(value, tensors) for value in content))
    raise ValueError(f"unknown kind of element: {kind!r}")


def lay_out(pieces: Mapping[str, Piece]) -> Layout:
    """Assign a location to each tensor, starting with the widest types, so that every tensor is
    aligned.

    If there are pieces, the header contains their positions in the whole tensors, in the format of
    `torch.distributed.checkpoint.HuggingFaceStorageWriter`.
    """
    tensors = {name: piece.tensor for name, piece in pieces.items() if piece.tensor is not None}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} has the type {tensor.dtype}, which checkpoints do not support"
            )
    at = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if any(tensor.shape != pieces[name].whole for name, tensor in tensors.items()):
        positions = {name: {"saved_offsets": piece.offsets} for name, piece in pieces.items()}
        entries["__metadata__"] |= {
            "DCP_SHARDING_INFO": json.dumps(positions),
            "DCP_VERSION": "1.0",
        }
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        tensor = tensors[name]
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries).encode()
    header_bytes = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    header = (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)
    locations = [
        TensorLocation(
            *(name, tensor.dtype, tensor.shape, header_bytes + entries[name]["data_offsets"][0]),
            offsets=pieces[name].offsets,
            whole=pieces[name].whole,
        )
        for name, tensor in tensors.items()
    ]
    return Layout(header, locations, header_bytes + at)


def read_tensors(file: Path | bytes) -> dict[str, Tensor]:
    """Return the tensors of a file by name. If `file` is a path, the file is mapped into memory,
    and changes to the tensors affect only this process. Raises ValueError if the file is not a
    safetensors file."""
    try:
        if isinstance(file, Path):
            return safetensors.torch.load_file(file)
        return safetensors.torch.load(file)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


def views(file: Tensor) -> dict[str, Tensor]:
    """Return views of the tensors in a file that `lay_out` describes. `file` contains the bytes of
    the file, possibly followed by other bytes."""
    start = 8 + int.from_bytes(file[:8].numpy().tobytes(), "little")
    entries = json.loads(file[8:start].numpy().tobytes())
    found = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            first, end = (start + at for at in entry["data_offsets"])
            dtype = TORCH_DTYPES[entry["dtype"]]
            found[name] = file[first:end].view(dtype).view(entry["shape"])
    return found


def _encode(value: Any, path: str, pieces: dict[str, Piece]) -> Any:
    if isinstance(value, Tensor):
        value = Piece(value.detach(), (0,) * value.ndim, value.shape)
    if isinstance(value, Piece):
        name = path
        while name in pieces:  # {"a/b": ...} and {"a": {"b": ...}}
            name += "'"
        pieces[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = []
        for key, each in value.items():
            if not isinstance(key, str | int):
                raise ValueError(f"{path}: the key {key!r} is neither a string nor an integer")
            items.append([key, _encode(each, f"{path}/{key}" if path else str(key), pieces)])
        return {"dict": items}
    if isinstance(value, list | tuple):
        items = [_encode(each, f"{path}/{i}", pieces) for i, each in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, TaggedValue):
        return {"tagged": [value.kind, _encode(value.content, path, pieces)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{path} is a {type(value).__name__}, which checkpoints do not support")
