"""Values of a script's state that JSON can't represent, such as sets, bytes and numpy arrays.

Each such value is stored as the name of its type and plain content, and is read without executing
code. Values of other types are refused when they are saved. Only checkpoints of the first versions
of this format contain pickles. A pickle is read only if all of its values have one of these types.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import pickle
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ray_workers.training.checkpoint.safetensors_layout import DTYPES, PickledValue, TaggedValue
from ray_workers.training.core import compat_torch

PLAIN = (bool, int, float, str, types.NoneType)
"""Types that have a form in JSON; their subclasses don't."""
MAX_INT = 2**63
"""JSON has larger numbers too, but Python reads at most 4300 decimal digits."""
NUMPY_KINDS = "biufcSUmM"
"""Kinds of numpy's types whose values are described by the type's name and their bytes."""


class _Form(NamedTuple):
    """How the values of a type are stored."""

    dump: Callable[[Any], Any]
    """Returns plain values: numbers, strings, lists and tensors."""
    load: Callable[[Any], Any]


def _array_of(content: Any) -> Any:
    name, shape, data = content
    return np.frombuffer(bytearray(_bytes_of(data)), np.dtype(name)).reshape(shape)


def _dump_array(value: Any) -> Any:
    if value.dtype.kind not in NUMPY_KINDS:
        raise TypeError(f"numpy's type {value.dtype} is not supported")
    return [value.dtype.str, list(value.shape), _tensor_of(value.tobytes())]


def _dump_time(value: Any) -> Any:
    if type(value.tzinfo) not in (types.NoneType, datetime.timezone):
        raise TypeError(f"its time zone is a {type(value.tzinfo).__name__}: convert it to UTC")
    return [value.isoformat(), value.fold]


def _tensor_of(content: bytes | bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is not a tensor type")
    return found


def _tensor_as_bytes(value: Tensor) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise TypeError("only dense tensors with values are supported: convert it with to_dense()")
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), flat.view(torch.uint8)]


def _tensor_from_bytes(content: Any) -> Tensor:
    name, shape, data = content
    whole: Tensor = data.view(_torch_dtype(name)).view(shape)
    return whole


def _from_isoformat(kind: Any) -> Callable[[Any], Any]:
    return lambda content: kind.fromisoformat(content[0]).replace(fold=content[1])


_FORMS: dict[type, _Form] = {
    int: _Form(hex, lambda content: int(content, 16)),
    complex: _Form(lambda value: [value.real, value.imag], lambda content: complex(*content)),
    bytes: _Form(_tensor_of, _bytes_of),
    bytearray: _Form(_tensor_of, lambda content: bytearray(_bytes_of(content))),
    range: _Form(lambda it: [it.start, it.stop, it.step], lambda content: range(*content)),
    decimal.Decimal: _Form(str, decimal.Decimal),
    datetime.datetime: _Form(_dump_time, _from_isoformat(datetime.datetime)),
    datetime.time: _Form(_dump_time, _from_isoformat(datetime.time)),
    datetime.date: _Form(datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: _Form(
        lambda it: [it.days, it.seconds, it.microseconds],
        lambda content: datetime.timedelta(*content),
    ),
    type(Path()): _Form(str, Path),
    np.ndarray: _Form(_dump_array, _array_of),
    Tensor: _Form(_tensor_as_bytes, _tensor_from_bytes),
    torch.dtype: _Form(lambda value: str(value).removeprefix("torch."), _torch_dtype),
    torch.device: _Form(str, torch.device),
    torch.Size: _Form(list, torch.Size),
}
_NAMES = {kind: kind.__name__ for kind in _FORMS} | {type(Path()): "Path"}
_LOADS: dict[str, Callable[[Any], Any]] = {
    **{_NAMES[kind]: form.load for kind, form in _FORMS.items()},
    "number": lambda content: _array_of(content)[()],
    "set": set,
    "frozenset": frozenset,
    "deque": lambda content: collections.deque(*content),
    "items": lambda content: dict(map(tuple, content)),
}


def tagged(value: Any, path: str) -> Any:
    """Return a value as nested dictionaries, lists, tuples, tensors, plain values and TaggedValues.
    path: the position of the value in the state. Raises ValueError, with the path and the type, for
    a value that can't be saved."""
    kind = type(value)
    if kind in PLAIN and not (kind is int and abs(value) >= MAX_INT):
        return value
    if isinstance(value, DTensor):
        raise ValueError(f"{path} is a DTensor, which must be in a dictionary or list")
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.dtype in DTYPES and not value.is_meta:
            return value.detach()
        return _dumped(Tensor, value, path)
    if isinstance(value, Mapping):
        if all(type(key) in (str, int) for key in value):
            return {key: tagged(one, f"{path}/{key}") for key, one in value.items()}
        pairs = [[tagged(key, path), tagged(one, f"{path}/{key}")] for key, one in value.items()]
        return TaggedValue("items", pairs)
    if kind in (list, tuple):
        return kind([tagged(one, f"{path}/{at}") for at, one in enumerate(value)])
    if kind in (set, frozenset):
        return TaggedValue(kind.__name__, [tagged(one, path) for one in value])
    if kind is collections.deque:
        items = [tagged(one, f"{path}/{at}") for at, one in enumerate(value)]
        return TaggedValue("deque", [items, value.maxlen])
    if isinstance(value, np.generic):
        return _dumped(np.ndarray, np.asarray(value), path, "number")
    if kind in _FORMS:
        return _dumped(kind, value, path)
    raise ValueError(
        f"{path} is a {kind.__name__}, which the checkpoints of divided models can't hold: "
        "return dictionaries, lists, numbers, strings, arrays or tensors from state_dict()"
    )


def _dumped(kind: type, value: Any, path: str, name: str | None = None) -> TaggedValue:
    try:
        return TaggedValue(name or _NAMES[kind], _FORMS[kind].dump(value))
    except TypeError as error:
        shown = type(value).__name__
        raise ValueError(f"{path} is a {shown}, which can't be saved: {error}") from error


def untagged(value: Any) -> Any:
    """Return the value that was passed to `tagged`. Tensors that are not inside of TaggedValues are
    returned unchanged. Raises ValueError for a tag or a pickle that dray does not read."""
    if isinstance(value, TaggedValue):
        if value.kind not in _LOADS:
            raise ValueError(f"this version of dray can't read values of the kind {value.kind!r}")
        return _LOADS[value.kind](_owned(value.content))
    if isinstance(value, PickledValue):
        return _unpickled(value.pickle)
    return _changed(value, untagged)


def _owned(value: Any) -> Any:
    """Return the content of a TaggedValue, with tensors in memory."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, TaggedValue | PickledValue):
        return untagged(value)
    return _changed(value, _owned)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([change(one) for one in value])
    return value


# Pickles of checkpoints that were written before all values were tagged.

_TYPES = (*DTYPES, torch.complex32, torch.complex64, torch.complex128)
_MODULES: dict[str, tuple[str, ...]] = {
    "builtins": ("set", "frozenset", "complex", "bytearray", "range", "slice"),
    "collections": ("OrderedDict", "Counter", "deque"),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "torch": ("Size", "device", *(str(one).removeprefix("torch.") for one in _TYPES)),
    **compat_torch.TENSORS_IN_PICKLES,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage_of
        if name in _MODULES.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(
            f"the checkpoint contains a pickle of {module}.{name}, but only pickles of Python's, "
            "numpy's and torch's own types are read"
        )


def _unpickled(pickled: Tensor) -> Any:
    try:
        return _Unpickler(io.BytesIO(_bytes_of(pickled.clone()))).load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError) as error:
        raise ValueError(f"the checkpoint contains a damaged pickle: {error}") from error


def _storage_of(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)
