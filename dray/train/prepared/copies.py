"""Copies of nested states, and digests of tensors. Digests are computed on the tensors' devices.

Each 32-bit word of a tensor is multiplied by an odd number that depends on its position, and the
products are added modulo 2**64. Every change of a single word changes the sum, because an odd
number has an inverse modulo 2**64. Other changes, such as two swapped words, are missed with a
probability of about 2**-31. A digest protects against faults, not against an adversary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_WIDTH = 1 << 14
"""Number of words per row. Each word is multiplied by a factor that depends on its column, and each
row's sum by a factor that depends on the row."""
_ROWS = 1 << 9
"""Number of rows that are multiplied at a time, which limits the memory to 64 MiB."""


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Return a number in [-2**63, 2**63) that is the same for equal tensors in the same order. The
    number also depends on the tensors' types, shapes, and signs of zeros."""
    found = 0
    for tensor in tensors:
        kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        found = _wrapped(found * _STEP + int.from_bytes(kind, "little") % _LARGE)
        found = _wrapped(found * _STEP + _of_words(tensor))
    return found


def changed(state: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each value of a nested state that is not a mapping, list or plain tuple."""
    if isinstance(state, Mapping):
        return {key: changed(one, change) for key, one in state.items()}
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)([changed(one, change) for one in state])
    return change(state)


def leaves(state: Any) -> Iterator[Any]:
    """Yield the values of a nested state that are not mappings, lists or tuples, in order."""
    if isinstance(state, Mapping | list | tuple):
        for one in state.values() if isinstance(state, Mapping) else state:
            yield from leaves(one)
    else:
        yield state


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state, and its numbers as tensors, in a fixed order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield from tensors_in(state[key])
    elif isinstance(state, list | tuple):
        for one in state:
            yield from tensors_in(one)
    elif isinstance(state, int | float):
        yield torch.tensor([float(state)], dtype=torch.float64)


_STEP = 0x9E3779B97F4A7C15
_LARGE = (1 << 61) - 1


def _wrapped(number: int) -> int:
    """Wrap a number to a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63


def _of_words(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() - data.numel() % 4
    words = (
        data[:whole].view(torch.int32)
        if data.storage_offset() % 4 == 0
        else (data[:whole].clone().view(torch.int32))
    )
    rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
    columns = _odd_numbers(_WIDTH, words.device)
    total = rest
    for number, first in enumerate(range(0, words.numel(), _WIDTH * _ROWS)):
        part = words[first : first + _WIDTH * _ROWS]
        num_rows, left = divmod(part.numel(), _WIDTH)
        sums = []
        if num_rows:
            rows = part[: num_rows * _WIDTH].view(num_rows, _WIDTH).to(torch.int64)
            sums.append(rows.mul_(columns).sum(1))
        if left:
            sums.append((part[-left:].to(torch.int64) * columns[:left]).sum().reshape(1))
        of_rows = torch.cat(sums)
        weighed = (of_rows * _odd_numbers(_WIDTH, words.device)[-of_rows.numel() :]).sum()
        total = _wrapped(total * _STEP + int(weighed.item()) + number)
    return total


@functools.cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x0DD)
    drawn = torch.randint(-(2**62), 2**62, (count,), dtype=torch.int64, generator=generator)
    return (drawn * 2 + 1).to(device)
