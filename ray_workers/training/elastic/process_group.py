"""Joins the process group of the ranks, and provides small collective operations for purposes other
than gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ray_workers.training import devices
from ray_workers.training.core import compat_torch
from ray_workers.training.elastic.kept_groups import kept

T = TypeVar("T")
OPERATION_LIMIT = timedelta(hours=12)
PIECE_BYTES = 1 << 20
BROADCAST_BYTES = 16 << 20
"""Maximum total size, in bytes, of tensors that are sent together."""
LOOK_S = 5e-5
"""Number of seconds between two polls of the device."""
_broken = threading.Event()
"""Whether the operations of the current group were aborted, or are about to be. An aborted
operation completes on the device like any other operation, but its result is undefined."""
one_at_a_time = threading.RLock()
"""Held while a group is aborted, and while this process moves to another round, so that the
watching thread can't abort a group of a later round."""


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
    _broken.clear()
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
        with one_at_a_time:
            _broken.set()
            compat_torch.abort_groups()
    else:
        dist.destroy_process_group()


def abort(is_due: Callable[[], bool] = lambda: True) -> None:
    """Abort all operations of a group on GPUs, which wakes this process if it waits for one of
    them. Can be called from another thread. Does nothing for gloo, whose abort wakes no thread.

    is_due: returns whether the current group is to be aborted.
    """
    with one_at_a_time:
        if _broken.is_set() or not dist.is_initialized() or dist.get_backend() == "gloo":
            return
        if is_due():
            _broken.set()  # before the operations end, so that no thread uses their results
            compat_torch.abort_operations()


def is_broken() -> bool:
    """Whether the operations of the current group were aborted."""
    return _broken.is_set()


def wait_for_results(device: torch.device) -> None:
    """Wait until all operations launched so far are complete, and check that none was aborted. Does
    nothing on CPU, where an operation either raises an exception or is complete when it returns.

    On a GPU, an operation is only launched, not necessarily complete, when it returns. If a peer is
    lost, the operation never completes until it is aborted, and then its result is undefined.
    Therefore this function must be called before results of other ranks change the state of this
    rank or determine what this rank does next. Raises DistBackendError if the group was aborted.
    """
    if not devices.is_gpu(device) or not dist.is_initialized():
        return
    end = devices.module_of(device).Event()
    end.record()
    while not end.query() and not _broken.is_set():
        time.sleep(LOOK_S)
    check_unbroken()


def check_unbroken() -> None:
    """Raise DistBackendError if the operations of the current group were aborted."""
    if _broken.is_set() and dist.is_initialized():
        raise dist.DistBackendError("NCCL communicator was aborted, because the group is broken")


def wait(works: list[dist.Work]) -> None:
    """Wait for all operations in the list, and remove them from it. A thread that waits in this
    function counts as waiting for its group (see `waiting_thread`)."""
    while works:
        works.pop().wait()


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return one-dimensional views of a contiguous tensor, of at most `PIECE_BYTES` each. If a rank
    is lost during a larger message, gloo often does not end the operation (see
    `waiting_thread`)."""
    return torch.split(tensor.view(-1), PIECE_BYTES // tensor.itemsize)


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
    wait_for_results(device)
    return bool(greatest == -least)


def rank_0s(flag: bool, rank: int, device: torch.device, world_size: int) -> bool:
    """Return the value that rank 0 passed, once every rank has called this function."""
    chosen = torch.full((), float(flag and rank == 0), device=device)
    add_up(chosen, world_size)
    is_chosen = bool(chosen.item())
    wait_for_results(device)
    return is_chosen


def maxima(values: Sequence[float], device: torch.device, world_size: int) -> list[float]:
    """Return the maximum of each value over all ranks. The values must not be NaN."""
    if world_size == 1:
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    wait_for_results(device)
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
    dist.all_gather_object(found, value)  # copies the results to the host, so they have arrived
    check_unbroken()
    return found


def have_rank_0s(tensors: Sequence[Tensor]) -> None:
    """Replace the contents of the tensors with their contents on rank 0. If the group breaks, the
    tensors on a GPU remain unchanged."""
    if not tensors:
        return
    targets = [tensor.detach() for tensor in tensors]
    device = targets[0].device
    received = [target.clone() for target in targets] if devices.is_gpu(device) else targets
    compat_torch.broadcast_from_rank_0(received, BROADCAST_BYTES)
    wait_for_results(device)
    if received is not targets:
        for target, values in zip(targets, received, strict=True):
            target.copy_(values)


def wait_for_all(device: torch.device, world_size: int) -> None:
    """Wait until every rank has called this function."""
    came = torch.ones((), device=device)
    add_up(came, world_size)
    came.item()
    wait_for_results(device)
