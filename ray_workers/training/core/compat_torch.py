"""Wrappers for all private names of PyTorch that training needs, each in its own function.

Each function documents its purpose, and why no public name is suitable. All functions were tested
with torch 2.11 and 2.13; tests/unit/training/core/test_compat_torch.py fails and names the function
if torch has changed one of them. (`torch._foreach_*` is documented, and is used directly.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

# This name is public in torch.distributed, but missing from its type annotations.
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T", bound=Tensor)
IMPORTED_LATE = ("torch._dynamo",)
"""Modules that torch imports when the first optimizer is created."""
IMPORTED_LATE_OPTIONAL = ("torch.profiler._cupti_monitor",)
"""Modules that only some versions of torch have, imported when the first profile is taken."""
TENSORS_IN_PICKLES = {"torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter")}
"""The functions that a pickle names for a tensor or parameter, by module."""
ONNX_REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"
"""The logger that warns about missing packages that only the export of other models requires.
`torch.onnx.export` has no option to disable this logger."""


def count_groups_from_zero() -> None:
    """Reset the group counter, so that the next group is number 0. The members of a group find each
    other in the store by the group's number. torch also counts groups that could not be formed, but
    a new rank has not seen these groups."""
    distributed_c10d._world.group_count = 0


def groups() -> Iterator[dist.ProcessGroup]:
    """Iterate over the groups that this process belongs to; public functions list only ranks."""
    yield from distributed_c10d._world.pg_map


def store_of_group() -> Store:
    """Return the store that the ranks of the default group used for their rendezvous. Public
    functions accept a store, but don't return one."""
    store: Store = distributed_c10d._get_default_store()
    return store


def set_timeout(group: dist.ProcessGroup | None, limit: timedelta) -> None:
    """Set the timeout for future operations of a group. The public functions set the timeout only
    when they create the group, and then the timeout also applies to connecting the ranks."""
    distributed_c10d._set_pg_timeout(limit, group)


def cap_memory_when_used(share: float) -> None:
    """Limit this process to a share of its GPU's memory, starting with its first use of CUDA. The
    public function initializes CUDA immediately, after which the program could no longer fork."""
    torch.cuda._lazy_call(lambda: torch.cuda.set_per_process_memory_fraction(share, 0))  # type: ignore[no-untyped-call]


def abort_operations() -> None:
    """Abort all groups, which wakes the threads that wait for their operations. The groups remain
    registered, unlike with `abort_groups`, because another thread might be using them. NCCL's
    communicators are aborted together, as in torch, because they could wait for each other
    (pytorch/pytorch#119797)."""
    members = list(groups())
    nccl = _nccl_of(members)
    if nccl is not None:
        nccl._group_start()
    for group in members:
        group.abort()
    if nccl is not None:
        nccl._group_end()


def _nccl_of(members: Sequence[dist.ProcessGroup]) -> Any:
    for group in members:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue
        if hasattr(backend, "_group_start"):  # gloo can also be the backend of CUDA tensors
            return backend
    return None


def abort_groups() -> None:
    """Terminate all groups without waiting for operations on the device, some of which might never
    end."""
    distributed_c10d._abort_process_group()


def broadcast_from_rank_0(tensors: Sequence[Tensor], num_bytes: int) -> None:
    """Replace the contents of the tensors with their contents on rank 0, sending at most
    `num_bytes` at once. `dist.broadcast` accepts only one tensor at a time."""
    group = distributed_c10d._get_default_group()
    _broadcast_coalesced(group, list(tensors), num_bytes, 0)


def exchange_parts(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part i of a flat tensor to rank i, and receive part `rank` of each rank's tensor (an
    all-to-all), with autograd support. `dist.all_to_all_single` does not support autograd, and the
    function in torch.distributed.nn requires an NCCL group."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    received: Tensor = all_to_all_single_autograd(flat, None, None, group)
    return received


def unhook(module: DistributedDataParallel) -> None:
    """Stop the module's backward pass from exchanging gradients. Deleting the wrapper is not
    enough, because the wrapper would exchange gradients over the old group for as long as the
    parameters exist."""
    module._remove_autograd_hooks()  # type: ignore[no-untyped-call]


def exclude_from_ddp(module: nn.Module, name: str) -> None:
    """Make DDP ignore one parameter of a module that it is about to wrap. DDP documents this
    method, but its name is private."""
    exclude = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    both = [name, f".{name}"]  # DDP uses either name
    exclude(module, both)  # type: ignore[no-untyped-call]


def report_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: Tensor
) -> None:
    """Report to the scaler, before its `update`, whether gradients overflowed (1.0) or not (0.0).
    Callers of this function decide whether to skip the optimizer step, instead of leaving the
    decision to the scaler's `step`."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found.device: found}


def name_of(operation: Any) -> str | None:
    """Return the name of an operation passed to a checkpoint policy, such as `aten::mm`; None if
    the operation has no such name."""
    if isinstance(operation, torch._ops.OpOverload):
        name: str = operation._schema.name
        return name
    return None


def tensor_without_values(kind: type[T], shape: Sequence[int], dtype: torch.dtype) -> T:
    """Return a tensor without memory, of a subclass that implements `__torch_dispatch__`. The
    public constructors allocate memory."""
    made: T = torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)
    return made


def changes_a_tensor(operation: Any) -> bool:
    """Return whether an operation passed to `__torch_dispatch__` changes one of its arguments. The
    operation's name does not show this in all cases."""
    return bool(operation._schema.is_mutable)


def replace_parameters(
    module: nn.Module, parameters: Mapping[str, nn.Parameter | None]
) -> dict[str, nn.Parameter | None]:
    """Replace parameters of a module with other parameters of the same names, and return all
    previous parameters. The parameters are not assigned as attributes, because torch would check
    them against the objects with which a wrapper has replaced the original parameters.
    """
    had = module._parameters
    module._parameters = {**had, **parameters}
    return had
