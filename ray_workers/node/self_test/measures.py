"""The checks and measurements of a self-test. Each check and each measurement runs on one torch
device, in the process that the test has started for the device.

A check raises `Mismatch` if the device returned a wrong value. Every other exception means that the
device could not be tested.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ray_workers.node.self_test.minority import minority

PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)
"""Each bit of the memory is set and cleared, alone and together with its neighbours."""
MEBIBYTE = 1 << 20


class Mismatch(Exception):
    """The device returned a wrong value. The message describes the difference."""


@dataclass(frozen=True)
class WorkSizes:
    """The amount of work of a self-test."""

    product: int = 4096
    """Rows and columns of the multiplied matrices."""
    repeats: int = 8
    memory_share: float = 0.5
    """Share of the free memory that is filled with patterns and read back."""
    chunk_bytes: int = 512 * MEBIBYTE
    copy_bytes: int = 128 * MEBIBYTE
    num_copies: int = 4


SMALL = WorkSizes(product=256, repeats=3, chunk_bytes=MEBIBYTE, copy_bytes=MEBIBYTE, num_copies=2)
"""For processors."""


def product(device: torch.device, sizes: WorkSizes) -> tuple[str, float]:
    """Multiply the same matrices several times. Return a hash of the products, which is the same on
    every device of the same model, and the time of the fastest product in seconds. Raises Mismatch
    if two of the products differ in any bit."""
    hashed = hashlib.sha256()
    fastest = float("inf")
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (_matrix(sizes.product, seed).to(device, dtype) for seed in (1, 2))
        first = left @ right
        for _ in range(sizes.repeats):
            seconds, again = _timed(device, partial(torch.matmul, left, right))
            if dtype is torch.float32:
                fastest = min(fastest, seconds)
            if not _are_equal(first, again):
                raise Mismatch(f"a repeated {_name(dtype)} matrix product had a different result")
        hashed.update(_bytes_of(first))
    return hashed.hexdigest(), fastest


def _matrix(size: int, seed: int) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare bits, so that NaN equals itself and 0 differs from -0."""
    as_integers = torch.int32 if one.element_size() == 4 else torch.int16
    return not bool((one.view(as_integers) != other.view(as_integers)).any())


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def memory(device: torch.device, free_bytes: int, sizes: WorkSizes) -> float:
    """Fill a share of the free memory with each pattern, and read it back. Return the bytes per
    second. Raises Mismatch if a word differs."""
    num_chunks = max(1, int(free_bytes * sizes.memory_share) // sizes.chunk_bytes)
    words = sizes.chunk_bytes // 8
    chunks = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(num_chunks)]
    seconds = 0.0
    for pattern in PATTERNS:
        # Write everything before reading, so that caches don't hold what was written.
        filled_s, _ = _timed(device, partial(_fill, chunks, pattern))
        read_s, wrong = _timed(device, partial(_num_wrong, chunks, pattern))
        seconds += filled_s + read_s
        if wrong:
            raise Mismatch(f"{wrong} words of memory differ from what was written to them")
    return 2 * len(PATTERNS) * num_chunks * sizes.chunk_bytes / seconds


def _fill(chunks: Sequence[Tensor], pattern: int) -> None:
    for chunk in chunks:
        chunk.fill_(pattern)


def _num_wrong(chunks: Sequence[Tensor], pattern: int) -> int:
    return sum(int((chunk != pattern).sum()) for chunk in chunks)


def host_copies(device: torch.device, sizes: WorkSizes) -> tuple[float, float]:
    """Copy data to the device and back. Return the bytes per second in each direction. Raises
    Mismatch if the data changed."""
    sent = torch.randint(-(2**62), 2**62, (sizes.copy_bytes // 8,), dtype=torch.int64)
    received = torch.empty_like(sent)
    if device.type == "cuda":
        sent, received = sent.pin_memory(), received.pin_memory()
    there = torch.empty(sent.shape, dtype=torch.int64, device=device)
    to_s, _ = _fastest(device, partial(there.copy_, sent), sizes.num_copies)
    from_s, _ = _fastest(device, partial(received.copy_, there), sizes.num_copies)
    if not torch.equal(sent, received):
        raise Mismatch("data changed on the way to the GPU's memory and back")
    return sizes.copy_bytes / to_s, sizes.copy_bytes / from_s


def peer_copies(devices: Sequence[torch.device], sizes: WorkSizes) -> list[float]:
    """Copy data from each GPU to the next. Return the bytes per second of each GPU. Raises Mismatch
    if the data changed."""
    rates = []
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(-(2**62), 2**62, (sizes.copy_bytes // 8,), generator=generator)
    for at, device in enumerate(devices):
        target = devices[(at + 1) % len(devices)]
        sent, there = data.to(device), torch.zeros_like(data, device=target)
        seconds, _ = _fastest(target, partial(there.copy_, sent), sizes.num_copies)
        if not torch.equal(there.cpu(), data):
            raise Mismatch(f"data changed on the way from {device} to {target}")
        rates.append(sizes.copy_bytes / seconds)
    return rates


def all_reduce(
    devices: Sequence[torch.device], sizes: WorkSizes, reduce: Callable[[list[Tensor]], None]
) -> float:
    """Sum a tensor over all GPUs with `reduce`, which works in place. Return the bytes per second
    that each GPU sends. Raises Mismatch if a sum is wrong."""
    words, number = sizes.copy_bytes // 4, len(devices)
    fastest = float("inf")
    for _ in range(sizes.num_copies):
        parts = [torch.full((words,), float(n + 1), device=d) for n, d in enumerate(devices)]
        _wait(devices)
        began = time.perf_counter()
        reduce(parts)
        _wait(devices)
        fastest = min(fastest, time.perf_counter() - began)
        for device, part in zip(devices, parts, strict=True):
            if bool((part != number * (number + 1) / 2).any()):
                raise Mismatch(f"an all-reduce computed a wrong sum on {device}")
    return 2 * (number - 1) / number * sizes.copy_bytes / fastest


def processors(sizes: WorkSizes = SMALL) -> float:
    """Multiply the same matrices on each processor that this process may use. Return the time of
    the fastest product in seconds. Raises Mismatch if a product changes when the multiplication is
    repeated, or differs from the products of most processors."""
    torch.set_num_threads(1)
    allowed = sorted(os.sched_getaffinity(0))
    hashes, fastest = {}, float("inf")
    try:
        for core in allowed:
            os.sched_setaffinity(0, [core])
            try:
                hashes[core], seconds = product(torch.device("cpu"), sizes)
            except Mismatch as error:
                raise Mismatch(f"processor {core}: {error}") from None
            fastest = min(fastest, seconds)
    finally:
        os.sched_setaffinity(0, allowed)
    wrong = minority(hashes)
    if wrong:
        named = ", ".join(map(str, wrong))
        raise Mismatch(
            f"processor {named}: the matrix product differs from the product on the other "
            "processors"
        )
    return fastest


def _timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    _wait([device])
    began = time.perf_counter()
    result = work()
    _wait([device])
    return time.perf_counter() - began, result


def _fastest(device: torch.device, work: Callable[[], Any], number: int) -> tuple[float, Any]:
    return min((_timed(device, work) for _ in range(number)), key=lambda each: each[0])


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
