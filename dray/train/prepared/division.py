"""Divides a user's model among the ranks with torch's FSDP2, HSDP and tensor parallelism.

The axes are the fields of a job document's `parallel`. `tensor` is the innermost axis: neighbouring
ranks compute each layer together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from dray.train.prepared import dtensor
from dray.train.prepared.copies import changed


@dataclass(frozen=True)
class Axes:
    """The number of ranks along each axis. The product of these numbers is the total number of
    ranks."""

    data: int
    shard: int
    tensor: int

    @property
    def num_shares(self) -> int:
        """Number of shares of a global batch. Ranks along the tensor axis process the same
        samples."""
        return self.data * self.shard

    @property
    def is_divided(self) -> bool:
        return self.shard * self.tensor > 1


def axes_of(world_size: int, *, shard: int | None, tensor: int | None, is_blocked: bool) -> Axes:
    """Return the axes for `world_size` ranks. If `shard` is None and the model's blocks are named,
    `shard` defaults to the number of ranks divided by `tensor`. If the blocks are not named,
    `shard` defaults to 1. Raises ValueError for sizes that do not divide the number of ranks."""
    tensor = 1 if tensor is None else tensor
    for name, size in (("shard", shard), ("tensor", tensor)):
        if size is not None and size < 1:
            raise ValueError(f"prepare() was given {name}={size}, but it must be at least 1")
    if world_size % tensor:
        raise ValueError(
            f"tensor is {tensor}, which does not divide the number of ranks, {world_size}"
        )
    left = world_size // tensor
    if shard is None:
        shard = left if is_blocked else 1
    if left % shard:
        raise ValueError(
            f"shard x tensor is {shard} x {tensor}, which does not divide the number of ranks, "
            f"{world_size}"
        )
    return Axes(left // shard, shard, tensor)


def blocks_named(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules whose names match the pattern, part by part: `layers.*` matches `layers.0`
    but not `layers.0.norm`. Raises ValueError if no module matches."""
    wanted = pattern.split(".")
    found = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            found.append(module)
    if not found:
        raise ValueError(f"blocks={pattern!r} matches no module: {_names(model)}")
    return found


def prepare_blocks(blocks: Sequence[nn.Module], *, recompute: bool, compiled: bool) -> None:
    """Modify blocks in place. recompute: recompute their activations in the backward pass.
    compiled: compile them."""
    for block in blocks:
        if recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if compiled:
            block.compile()


def divide(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: Mapping[str, ParallelStyle] | None,
    axes: Axes,
) -> None:
    """Divide the model in place. Every rank starts with rank 0's weights. A collective."""
    if axes.tensor > 1:
        _check_plan(model, plan)
    device = next(model.parameters()).device
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(
        device.type,
        (axes.data, axes.shard, axes.tensor),
        mesh_dim_names=("data", "shard", "tensor"),
    )
    tied = _tied(model)
    if axes.tensor > 1:
        assert plan is not None
        _divide_matrices(model, mesh["tensor"], plan)
        _tie(model, tied)
    if axes.num_shares > 1:
        exchanging = mesh["data", "shard"] if axes.data > 1 else mesh["shard"]
        for block in blocks:
            fully_shard(block, mesh=exchanging)
        fully_shard(model, mesh=exchanging)
    _check_even(model, axes)
    for names in tied:
        if len({id(model.get_parameter(name)) for name in names}) > 1:
            raise ValueError(
                f"{' and '.join(names)} are the same parameter, which FSDP can't gather for a "
                "block and for another part of the model: choose a pattern for blocks that leaves "
                "this parameter outside all blocks, or inside a single block"
            )


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie parameters again if they were a single parameter before torch divided each module
    separately. Raises ValueError if the parameters are divided in different ways."""
    for names in tied:
        first, *others = (model.get_parameter(name) for name in names)
        for name, other in zip(names[1:], others, strict=True):
            if getattr(other, "placements", ()) != getattr(first, "placements", ()):
                raise ValueError(
                    f"{names[0]} and {name} are the same parameter, but tensor_plan divides them "
                    "in different ways: divide both along the same dimension, or neither"
                )
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, first)


def _check_plan(model: nn.Module, plan: Mapping[str, ParallelStyle] | None) -> None:
    if not plan:
        raise ValueError(
            "parallel.tensor is above 1, but prepare() was given no tensor_plan: name the modules "
            "to divide, for example tensor_plan={'layers.*.up': ColwiseParallel(), ...}"
        )
    names = [name.split(".") for name, _ in model.named_modules()]
    for pattern in plan:
        wanted = pattern.split(".")
        if not any(len(n) == len(wanted) and all(map(fnmatchcase, n, wanted)) for n in names):
            raise ValueError(
                f"tensor_plan names {pattern!r}, which matches no module: {_names(model)}"
            )


def _divide_matrices(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    parallelize_module(model, mesh, dict(plan))
    # Optimizers and gradient norms can't mix DTensors and plain tensors.
    for name, module in list(model.named_modules()):
        own = [
            key for key, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)
        ]
        if not own:
            continue
        if any(True for _ in module.children()):
            raise ValueError(
                f"the parameter {'.'.join(filter(None, (name, own[0])))} belongs to a module with "
                "submodules: with tensor above 1, move it to a module without submodules, or "
                "divide its module with tensor_plan"
            )
        _replicate(module, mesh)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make every rank of the mesh compute the whole module, with DTensors as parameters."""

    def as_whole(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(_whole_input(one, mesh) for one in inputs)

    def as_plain(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output

    distribute_module(module, mesh, None, as_whole, as_plain)


def _whole_input(one: Any, mesh: DeviceMesh) -> Any:
    if isinstance(one, DTensor):
        return one.redistribute(mesh, [Replicate()])
    if isinstance(one, Tensor):
        return DTensor.from_local(one, mesh, [Replicate()], run_check=False)
    return one


def _check_even(model: nn.Module, axes: Axes) -> None:
    """Check that shard and tensor divide each parameter evenly. FSDP divides the parts that tensor
    parallelism has made. If these parts are uneven, torch's DTensor and FSDP disagree about the
    positions of the parts (torch 2.13)."""
    if min(axes.shard, axes.tensor) == 1:
        return
    parts = axes.shard * axes.tensor
    for name, parameter in model.named_parameters():
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        dims = [placement.dim for placement in placements if hasattr(placement, "dim")]
        if len(dims) > len(set(dims)) and parameter.shape[dims[0]] % parts:
            raise ValueError(
                f"{name} has {parameter.shape[dims[0]]} rows or columns, which are divided by "
                "both shard and tensor: the number must be a multiple of shard x tensor, which "
                f"is {parts}"
            )


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimizer's groups.

    Raises ValueError for an optimizer that has taken a step, or has parameters of another model.
    """
    if any(values.get("step", 1) != 0 for values in optimizer.state.values()):
        raise ValueError(
            "the optimizer already has state: call prepare() before the first step, and let it "
            "restore checkpoints"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ValueError(
            "the optimizer has a parameter that does not belong to the model: create the "
            "optimizer with model.parameters()"
        ) from None


def retarget(
    optimizer: torch.optim.Optimizer, model: nn.Module, names: Sequence[Sequence[str]]
) -> None:
    """Replace the parameters in the optimizer's groups with their divided versions, and keep the
    options. The initial state of an optimizer, such as Adagrad's sums, is also divided."""
    divided = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        replaced = [divided[name] for name in own]
        for before, after in zip(group["params"], replaced, strict=True):
            begun = optimizer.state.pop(before, {})
            if begun:
                optimizer.state[after] = {key: like(one, after) for key, one in begun.items()}
        group["params"] = replaced


def set_exchanging(model: nn.Module, exchanges: bool) -> None:
    """Set whether backward passes exchange gradients or accumulate them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(exchanges)


def whole(value: Any) -> Any:
    """Replace the divided tensors in a nested state with whole tensors. A collective."""
    return changed(value, lambda one: one.full_tensor() if isinstance(one, DTensor) else one)


def like(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of a whole tensor, if the tensor has the shape of a divided
    parameter. Every rank must have the whole tensor."""
    if not (isinstance(value, Tensor) and isinstance(parameter, DTensor)):
        return value
    if value.shape != parameter.shape:
        return value
    part = dtensor.plain_part_of(value, parameter)
    own = torch.empty(part.shape, dtype=value.dtype, device=parameter.device)
    return dtensor.like(own.copy_(part), parameter)


def _names(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (
        f"the model has the modules {', '.join(names[:12])}{more}"
        if names
        else "the model has no submodules"
    )
