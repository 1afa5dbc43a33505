"""Every private name of torch that the training needs, each behind a function of its own.

A function says what for, and why no public name does. All were seen to work with torch 2.11 and
2.13; tests/unit/training/core/test_compat_torch.py fails, and says which one, where torch has
changed it. (`torch._foreach_*` is documented, and used where it is needed.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Public as names of torch.distributed, whose type annotations do not export them.
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed import distributed_c10d
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

StridedShard = _StridedShard
"""How FSDP cuts a dimension that the tensor axis has cut already. A placement that has it is no
`Shard`, and has no public name."""
IMPORTED_LATE = ("torch._dynamo",)
"""Modules that torch imports when the first optimizer is made."""
IMPORTED_LATE_IF_THERE = ("torch.profiler._cupti_monitor",)
"""The same, of some versions: when the first profile is taken."""
ONNX_REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"
"""The logger that advises which packages would convert other models. `torch.onnx.export` has no
option that keeps it quiet."""


def count_groups_from_zero() -> None:
    """Have the next group be the first. By this number the members of a group find each other at
    the store; torch also counts groups that could not be formed, which a newcomer has not seen."""
    distributed_c10d._world.group_count = 0


def groups() -> Iterator[dist.ProcessGroup]:
    """Every group that this process is in; public functions list only the names of ranks."""
    yield from distributed_c10d._world.pg_map


def store_of_group() -> Store:
    """The store at which the ranks of the world met. Public functions only take one."""
    store: Store = distributed_c10d._get_default_store()
    return store


def set_timeout(group: dist.ProcessGroup | None, limit: timedelta) -> None:
    """How long operations of a group may take from now on. Public is only the limit at its start,
    which is for connecting as well."""
    distributed_c10d._set_pg_timeout(limit, group)


def cap_memory_when_used(share: float) -> None:
    """Have this process take no more than this share of its GPU's memory, from when its program
    first uses CUDA. The public function begins with CUDA at once, and the program may still fork
    before that."""
    torch.cuda._lazy_call(lambda: torch.cuda.set_per_process_memory_fraction(share, 0))  # type: ignore[no-untyped-call]


def abort_groups() -> None:
    """End all groups without waiting for operations on the device, some of which may never end."""
    distributed_c10d._abort_process_group()


def broadcast_from_rank_0(tensors: Sequence[Tensor], num_bytes: int) -> None:
    """Replace what the tensors hold by what they hold on rank 0, up to `num_bytes` of them at once:
    `dist.broadcast` takes one tensor at a time."""
    group = distributed_c10d._get_default_group()
    _broadcast_coalesced(group, list(tensors), num_bytes, 0)


def exchange_parts(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of a flat tensor for part `rank` of rank i, with a gradient: an all-to-all in equal
    parts. `dist.all_to_all_single` has no gradient, and torch.distributed.nn's needs a group of
    NCCL."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    received: Tensor = all_to_all_single_autograd(flat, None, None, group)
    return received


def unhook(module: DistributedDataParallel) -> None:
    """Have a module's backward pass exchange nothing any more. A wrapper that was merely deleted
    would, over the old group, however long its parameters live."""
    module._remove_autograd_hooks()  # type: ignore[no-untyped-call]


def exclude_from_ddp(module: nn.Module, name: str) -> None:
    """Have DDP leave one parameter alone of a module that it is about to wrap. DDP documents the
    method, under a private name."""
    exclude = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    both = [name, f".{name}"]  # DDP looks it up by either
    exclude(module, both)  # type: ignore[no-untyped-call]


def forget_gathered_state(optimizer: ZeroRedundancyOptimizer) -> None:
    """Release the whole state that `consolidate_state_dict` has left; otherwise it stays in memory
    until the next call."""
    optimizer._all_state_dicts = []  # type: ignore[attr-defined]


def report_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: Tensor
) -> None:
    """Tell the scaler, ahead of its `update`, whether gradients overflowed (1.0) or not (0.0),
    where the caller has decided about the step. The scaler's own `step` decides by itself."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found.device: found}


def name_of(operation: Any) -> str | None:
    """`aten::mm` of an operation that a checkpoint policy is asked about; None if it has no such
    name."""
    if isinstance(operation, torch._ops.OpOverload):
        name: str = operation._schema.name
        return name
    return None


def replace_parameters(
    module: nn.Module, parameters: Mapping[str, nn.Parameter | None]
) -> dict[str, nn.Parameter | None]:
    """Give a module other parameters of its own in place of those of the same names, and return
    those it had. Assigned one by one, a parameter is checked against what a wrapper has put there.
    """
    had = module._parameters
    module._parameters = {**had, **parameters}
    return had
