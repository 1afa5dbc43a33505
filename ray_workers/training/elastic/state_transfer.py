"""Transfers the state of a replica to ranks that do not have it.

After a failure, the ranks of a group can differ by one step, because an all-reduce may have
completed on only some of them. A replacement has no state at all. The state of the rank with the
most progress is correct, because replicas that have completed the same step are bitwise identical;
the other ranks receive this state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dray.train.prepared.copies import changed, leaves
from ray_workers.training.elastic import process_group

FLAT_BYTES = 16 << 20
"""Approximate maximum size, in bytes, of the small tensors that are sent together."""
Group = dist.ProcessGroup | None
"""None for the default group."""


def everyones(number: int, device: torch.device, world_size: int) -> list[int]:
    """Return the numbers that the ranks passed, indexed by rank. A collective operation."""
    if world_size == 1:
        return [number]
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(all_of_them, mine)
    found = [int(one.item()) for one in all_of_them]
    process_group.wait_for_results(device)
    return found


def newest(progress: int, device: torch.device, world_size: int) -> tuple[int, int, bool]:
    """Return (furthest progress, lowest rank with this progress, whether all ranks have it). A
    collective operation."""
    all_progress = everyones(progress, device, world_size)
    best = max(all_progress)
    return best, all_progress.index(best), all(one == best for one in all_progress)


def broadcast(
    state: Callable[[], Mapping[str, Any]],
    source: int,
    rank: int,
    device: torch.device,
    group: Group = None,
) -> dict[str, Any] | None:
    """Broadcast the source's state. All other ranks of the group return the state, on `device`; the
    source returns None. A collective operation of the group; `source` and `rank` are global ranks.

    `state` is called only on the source, and returns nested mappings, lists, and tuples of tensors
    and plain values.
    """
    tensors: list[Tensor] = []
    outline: list[Any] = [None]
    if rank == source:
        outline = [_outlined(state(), tensors)]
    dist.broadcast_object_list(outline, src=source, device=device, group=group)
    placeholders = _placeholders(outline[0])
    if rank != source:
        tensors = [
            torch.empty(each.shape, dtype=each.dtype, device=device) for each in placeholders
        ]
    for piece in _pieces(tensors):
        _broadcast_together(piece, source, rank, device, group)
    process_group.wait_for_results(device)
    if rank == source:
        return None
    moved = (
        tensor.to(each.device_type) for tensor, each in zip(tensors, placeholders, strict=True)
    )
    rebuilt: dict[str, Any] = _rebuilt(outline[0], moved)
    return rebuilt


def gather(
    state: Callable[[], Mapping[str, Any]], device: torch.device, group: Group = None
) -> list[dict[str, Any]]:
    """Return the states of the other ranks, in order, on the first rank of a group, and an empty
    list on other ranks. A collective operation of the group.

    The states are received in host memory, because their total size can exceed a GPU's memory.
    `state` is called on each rank except the first, and returns the same structure as for
    `broadcast`.
    """
    first, *others = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    if others and dist.get_rank() != first:
        tensors: list[Tensor] = []
        dist.send_object_list([_outlined(state(), tensors)], dst=first, device=device)
        for piece in _pieces(tensors):
            for part in process_group.pieces(_packed(piece, device)):
                dist.send(part, dst=first)
        return []
    received = [_received(source, device) for source in others]
    process_group.wait_for_results(device)
    return received


def _received(source: int, device: torch.device) -> dict[str, Any]:
    outline: list[Any] = [None]
    dist.recv_object_list(outline, src=source, device=device)
    tensors = [torch.empty(each.shape, dtype=each.dtype) for each in _placeholders(outline[0])]
    for piece in _pieces(tensors):
        size = sum(tensor.numel() for tensor in piece)
        flat = torch.empty(size, dtype=piece[0].dtype, device=device)
        for part in process_group.pieces(flat):
            dist.recv(part, src=source)
        _unpack(flat, piece)
    rebuilt: dict[str, Any] = _rebuilt(outline[0], iter(tensors))
    return rebuilt


class _Placeholder:
    """A placeholder for a tensor in a state."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.device_type = tensor.device.type  # an optimizer's step count can be on the CPU


def _outlined(value: Any, tensors: list[Tensor]) -> Any:
    """Replace each tensor in the value with a `_Placeholder`, and append the tensors to `tensors`,
    in order."""

    def placeholder_of(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        tensors.append(one.detach())
        return _Placeholder(one)

    return changed(value, placeholder_of)


def _placeholders(value: Any) -> list[_Placeholder]:
    """Return the placeholders in an outline, in order."""
    return [one for one in leaves(value) if isinstance(one, _Placeholder)]


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    return changed(value, lambda one: next(tensors) if isinstance(one, _Placeholder) else one)


def _pieces(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group the tensors that are sent at once: small tensors of the same type together, large
    tensors individually."""
    pieces: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        fits = pieces and pieces[-1][0].dtype == tensor.dtype and size < FLAT_BYTES
        if fits:
            pieces[-1].append(tensor)
        else:
            pieces.append([tensor])
            size = 0
        size += tensor.nbytes
    return pieces


def _broadcast_together(
    tensors: list[Tensor], source: int, rank: int, device: torch.device, group: Group
) -> None:
    flat = _packed(tensors, device)
    if flat.numel() == 0:
        return
    for part in process_group.pieces(flat):
        dist.broadcast(part, src=source, group=group)
    if rank != source and len(tensors) > 1:
        _unpack(flat, tensors)


def _packed(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the tensors' elements in one dimension. A single tensor on `device` is not copied if
    it is contiguous."""
    flat = [tensor.reshape(-1).to(device) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
