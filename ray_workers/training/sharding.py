"""Parameters, gradients and optimizer state spread over the ranks: torch's FSDP2.

Of each parameter a rank holds a part; the whole is there only while a unit of the model computes
with it. `parallel.shard` ranks hold a model together; with `parallel.data` there are several such
groups, which exchange gradients besides (hybrid sharding).

A checkpoint holds whole tensors, as that of replicas does, so that either loads the other's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dray import spec
from ray_workers.training.feeding import Share
from ray_workers.training.replica import Autocast, Replica
from ray_workers.training.workload import LossSum


def mesh_of(options: spec.Parallel, world_size: int, device: torch.device) -> DeviceMesh:
    """Ranks that hold a model together are neighbours, so mostly on one node. A collective."""
    if options.shard == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // options.shard, options.shard)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "shard"))


def spread_out(model: nn.Module, mesh: DeviceMesh, *, zero: int) -> FSDPModule:
    """Have each rank keep its part of the model, in place."""
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=zero == 3)
    sharded: FSDPModule = fully_shard(model, mesh=mesh, reshard_after_forward=zero == 3)
    return sharded


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at once, besides the rest: the blocks of a model that has such."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (part for part in child if any(True for _ in part.parameters()))


class ShardedReplica(Replica):
    """As `Replica`, of a model that the ranks hold together."""

    def __init__(
        self,
        model: nn.Module,
        loss_sum: LossSum,
        autocast: Autocast,
        sharded: FSDPModule,
        is_asked_to_leave: Callable[[], bool],
    ) -> None:
        """sharded: the same model, spread out."""
        super().__init__(model, loss_sum, autocast)
        self._sharded = sharded
        self._is_asked_to_leave = is_asked_to_leave
        self.leaves = False
        """Whether somebody had been asked to leave at the last step: all save together."""

    def form(self, world_size: int) -> None:
        self._world_size = world_size

    def settle_buckets(self, shares: Callable[[], Sequence[Share]]) -> None:
        """There are none."""

    def backward(
        self,
        shares: Sequence[Share],
        scale: Tensor | None,
        prepare: Callable[[int], None],
        before_exchange: Callable[[], None],
    ) -> None:
        (mine,) = shares
        prepare(mine.batch.number)
        # FSDP divides by the number of ranks, as DDP does.
        weight = mine.batch.weight * self._world_size
        root = torch.full((), weight, device=self._objective.slot.device)
        if scale is not None:
            root *= scale
        *parts, last = mine.micro_batches
        self._sharded.set_requires_gradient_sync(False)
        for inputs, targets in parts:
            torch.autograd.backward(self._objective(inputs, targets), root)
        self._sharded.set_requires_gradient_sync(True)
        loss = self._objective(*last)
        before_exchange()
        torch.autograd.backward(loss, root)

    def take_loss(self) -> Tensor:
        carried = self._objective.slot.grad
        assert carried is not None
        self._objective.slot.grad = None
        asked = carried.new_tensor(float(self._is_asked_to_leave()))
        both = torch.stack((carried / self._world_size, asked))
        dist.all_reduce(both)
        self.leaves = bool(both[1] > 0.0)
        return both[0]

    def grad_norm(self) -> Tensor:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def skeleton_of(model: nn.Module) -> nn.Module:
    """The same modules without their numbers, which are not copied on the way."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    empty |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, empty)


def gathered(state: Any, *, keep: bool) -> Any:
    """A nested state with whole tensors where it has parts. A collective, in the state's order.

    keep: False for None in the place of every tensor, on a rank that has no use for them.
    """
    if isinstance(state, DTensor):
        whole = state.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(state, Tensor):
        return state if keep else None
    if isinstance(state, Mapping):
        return {key: gathered(value, keep=keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([gathered(value, keep=keep) for value in state])
    return state


def load_model(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """RuntimeError for other names or shapes."""
    own = model.state_dict()
    parts = {name: _part(value, own.get(name)) for name, value in whole.items()}
    model.load_state_dict(parts)


def optimizer_parts(optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer of which this rank holds parts, from that of a whole one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        place: {name: _part_of_state(value, parameters[place]) for name, value in values.items()}
        for place, values in whole["state"].items()
    }
    return {**whole, "state": state}


def _part_of_state(value: Any, parameter: Tensor) -> Any:
    has_its_shape = isinstance(value, Tensor) and value.shape == parameter.shape
    return _part(value, parameter) if has_its_shape and value.ndim else value


def _part(whole: Tensor, like: Tensor | None) -> Tensor:
    """This rank's part, cut out of the whole that every rank has."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    there = whole.to(like.device, like.dtype)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)
