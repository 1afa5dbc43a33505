"""Copies of nested states, and checksums of tensors, which are computed on the tensors' devices.

Each 32-bit word of a tensor is multiplied by an odd number that depends on its position, and the
products are added modulo 2**64. Every change of a single word changes the sum, because an odd
number has an inverse modulo 2**64. Other changes, such as two swapped words, are missed with a
probability of about 2**-31 by one sum, and of about 2**-62 by two sums with independent numbers. A
checksum protects against faults, not against an adversary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_WIDTH = 1 << 14
"""Number of words per row. Each word is multiplied by a factor that depends on its column, and each
row's sum by a factor that depends on the row."""
_ROWS = 1 << 9
"""Number of rows whose sums are added at a time."""
_BLOCK_ROWS = {"cpu": 1 << 3}
"""Number of rows that are multiplied at a time, by device type, by default `_ROWS`. A CPU's buffers
fit into its cache, which is 5 times as fast; a GPU's buffers have 64 MiB."""


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a number in [-2**63, 2**63) that is the same for equal tensors in the same order. The
    number also depends on the tensors' types, shapes, and signs of zeros."""
    return checksum(tensors, num_sums=1)[0]


@torch.no_grad()
def checksum(tensors: Iterable[Tensor], *, num_sums: int = 2) -> tuple[int, ...]:
    """Return independent numbers in [-2**63, 2**63) that are the same for equal tensors in the same
    order. The numbers also depend on the tensors' types, shapes, and signs of zeros. No tensor is
    copied to another device, and the function waits only once for each device."""
    kinds: list[int] = []
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        kinds.append(int.from_bytes(kind, "little") % _LARGE)
        sums = _of_words(tensor, num_sums)
        by_device.setdefault(tensor.device, []).append((place, sums))
    of_tensors: list[list[int]] = [[]] * len(kinds)
    for found in by_device.values():
        values = torch.stack([sums for _, sums in found]).tolist()
        for (place, _), value in zip(found, values, strict=True):
            of_tensors[place] = value
    totals = [0] * num_sums
    for kind_number, sums_of_tensor in zip(kinds, of_tensors, strict=True):
        for number, value in enumerate(sums_of_tensor):
            total = totals[number] * _STEP + kind_number
            totals[number] = _wrapped(total * _STEP + value)
    return tuple(totals)


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


def _of_words(tensor: Tensor, num_sums: int) -> Tensor:
    """Return the sums over the tensor's words, int64 of shape (num_sums,), on its device."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() - data.numel() % 4
    words = (
        data[:whole].view(torch.int32)
        if data.storage_offset() % 4 == 0
        else (data[:whole].clone().view(torch.int32))
    )
    factors = [_odd_numbers(number, words.device) for number in range(num_sums)]
    total = torch.zeros(num_sums, dtype=torch.int64, device=words.device)
    if whole < data.numel():
        rest = torch.zeros(4, dtype=torch.uint8, device=words.device)
        rest[: data.numel() - whole] = data[whole:]
        total += rest.view(torch.int32)
    for number, first in enumerate(range(0, words.numel(), _WIDTH * _ROWS)):
        weighed = _weighed(words[first : first + _WIDTH * _ROWS], factors)
        total = total * _wrapped(_STEP) + weighed + number
    return total


def _weighed(part: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return sums of up to `_WIDTH * _ROWS` words, each multiplied by the factor of its column and
    the factor of its row. factors: the factors of the columns, for each sum."""
    num_rows, left = divmod(part.numel(), _WIDTH)
    rows = part[: num_rows * _WIDTH].view(num_rows, _WIDTH)
    of_rows: list[list[Tensor]] = [[] for _ in factors]
    block_rows = min(_BLOCK_ROWS.get(part.device.type, _ROWS), num_rows)
    wide, product = (rows.new_empty((block_rows, _WIDTH), dtype=torch.int64) for _ in range(2))
    for block in torch.split(rows, block_rows) if num_rows else ():
        wide[: len(block)].copy_(block)
        for sums, columns in zip(of_rows, factors, strict=True):
            torch.mul(wide[: len(block)], columns, out=product[: len(block)])
            sums.append(product[: len(block)].sum(1))
    if left:
        last = part[-left:].to(torch.int64)
        for sums, columns in zip(of_rows, factors, strict=True):
            sums.append((last * columns[:left]).sum().reshape(1))
    joined = [torch.cat(sums) for sums in of_rows]
    return torch.stack(
        [(sums * c[-sums.numel() :]).sum() for sums, c in zip(joined, factors, strict=True)]
    )


@functools.cache
def _odd_numbers(number: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x0DD + number)
    drawn = torch.randint(-(2**62), 2**62, (_WIDTH,), dtype=torch.int64, generator=generator)
    return (drawn * 2 + 1).to(device)
