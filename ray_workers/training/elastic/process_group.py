"""Joins the process group of the ranks, and provides small collective operations for purposes other
than gradients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ray_workers.training.core import compat_torch
from ray_workers.training.elastic.kept_groups import kept

T = TypeVar("T")
OPERATION_LIMIT = timedelta(hours=12)
BROADCAST_BYTES = 16 << 20
"""Maximum total size, in bytes, of tensors that are sent together."""


def keep_all() -> None:
    """Keep every existing group, and set its timeout, as `join` does for the default group."""
    for group in compat_torch.groups():
        compat_torch.set_timeout(group, OPERATION_LIMIT)
        kept.append(group)


def join(
    device: torch.device, store: compat_torch.Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Form the group with the ranks that use `store`. `timeout` limits the time for connecting.

    Operations of the group have practically no timeout, because the supervisor, which monitors the
    ranks, detects hangs more reliably than a fixed timeout.
    """
    compat_torch.count_groups_from_zero()
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    compat_torch.set_timeout(dist.group.WORLD, OPERATION_LIMIT)
    kept.append(dist.group.WORLD)


def leave() -> None:
    """Destroy the group. Must be called when every rank is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """Abandon a broken group without notifying the other ranks."""
    if not dist.is_initialized():
        return
    if dist.get_backend() != "gloo":
        compat_torch.abort_groups()
    else:
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """Return NCCL for CUDA, gloo for the CPU."""
    return str(dist.get_default_backend_for_device(device))


def all_same(value: int, device: torch.device, world_size: int) -> bool:
    """Return whether every rank passed the same value; all ranks get the same result."""
    if world_size == 1:
        return True
    # One reduction yields the maximum and the negated minimum of the values.
    bounds = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    greatest, least = bounds.tolist()
    return bool(greatest == -least)


def rank_0s(flag: bool, rank: int, device: torch.device, world_size: int) -> bool:
    """Return the value that rank 0 passed, once every rank has called this function."""
    chosen = torch.full((), float(flag and rank == 0), device=device)
    add_up(chosen, world_size)
    return bool(chosen.item())


def maxima(values: Sequence[float], device: torch.device, world_size: int) -> list[float]:
    """Return the maximum of each value over all ranks. The values must not be NaN."""
    if world_size == 1:
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(one) for one in found.tolist()]


def add_up(total: Tensor, world_size: int) -> None:
    """Replace `total` with its sum over all ranks."""
    if world_size > 1:
        dist.all_reduce(total)


def gathered(value: T, world_size: int) -> list[T]:
    """Return the values of all ranks, in rank order. The values must be picklable."""
    if world_size == 1:
        return [value]
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def have_rank_0s(tensors: Sequence[Tensor]) -> None:
    """Replace the contents of the tensors with their contents on rank 0."""
    if tensors:
        compat_torch.broadcast_from_rank_0([t.detach() for t in tensors], BROADCAST_BYTES)


def wait_for_all(device: torch.device, world_size: int) -> None:
    """Wait until every rank has called this function."""
    came = torch.ones((), device=device)
    add_up(came, world_size)
    came.item()
