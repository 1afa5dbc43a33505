"""Joining the other ranks, and replicating a model over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def join(device: torch.device, world_size: int) -> None:
    """Form the group from torchrun's environment; alone, a rank needs none."""
    if world_size > 1:
        dist.init_process_group(backend_of(device), init_method="env://")


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def replicate(model: nn.Module, world_size: int) -> nn.Module:
    """Wrap in DDP: after a backward pass, every rank holds the mean of the ranks' gradients."""
    if world_size == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def settle_buckets(model: nn.Module, backward: Callable[[], object]) -> None:
    """Bring a model that was just wrapped to where DDP is from its second step on.

    After its first backward pass DDP sorts the gradients into buckets anew, in the order they
    became ready. In a ring all-reduce of more than two ranks, where a gradient lies decides the
    order in which the ranks' parts are added. Without this pass the first step after a resume
    would add in another order than the run that was never interrupted.

    backward: one synchronised forward and backward pass; its gradients are thrown away.
    """
    if isinstance(model, DistributedDataParallel):
        backward()
        model.zero_grad()


def agree(value: int, device: torch.device, world_size: int) -> int:
    """Rank 0's value, on every rank."""
    if world_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def begin_sum(total: Tensor, world_size: int) -> dist.Work | None:
    """Start adding `total` up over the ranks, in place; wait for the answer before reading it."""
    return dist.all_reduce(total, async_op=True) if world_size > 1 else None
