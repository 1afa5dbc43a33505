"""A pretended NCCL: gloo between ranks on pretended GPUs.

It follows the rules of NCCL that gloo doesn't have:

- only tensors on the device are accepted, and receiving from any source is not supported;
- an operation whose peer is gone doesn't raise: it never completes on the device, until it is
  aborted or, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0, until the watchdog aborts the process;
- `abort` wakes all threads that wait in an operation or for the device. Operations that were not
  done complete with undefined results, and the communicator is unusable afterwards.

`install` makes it the default backend of the pretended device in this process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_flatten, tree_map_only

from ray_workers.shared.contracts import Cause
from ray_workers.training.core.errors import cause_of
from tests.fakes import pretend_gpu
from tests.fakes.pretend_gpu import PretendTensor

NAME = "pretend_nccl"
WATCHDOG_S = 0.3
"""How long after the loss of a peer it aborts the process."""
LOOK_S = 0.05
_POINT_TO_POINT = {"send", "recv_"}


class Communicator:
    """A gloo group on the host, and whether it may still be used."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        self.gloo = gloo
        self.inner = dist.ProcessGroup(rank, size)
        self.inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.is_aborted = False

    def wait(self, work: Any, results: Sequence[Tensor] = ()) -> None:
        """Wait until it is done. If a peer is gone or it is aborted, doesn't raise, but the results
        are undefined."""
        done: list[bool] = []
        waiting = threading.Thread(target=self._wait, args=(work, done), daemon=True)
        waiting.start()
        while waiting.is_alive() and not self.is_aborted:
            waiting.join(LOOK_S)
        if not done:
            _spoil(results)

    def _wait(self, work: Any, done: list[bool]) -> None:
        try:
            work.wait()
            done.append(True)
        except RuntimeError:
            if not self.is_aborted:
                _lose_peer()

    def refuse_if_aborted(self) -> None:
        if self.is_aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")


def _lose_peer() -> None:
    """Stop the device's progress and let the watchdog end the process."""
    if not pretend_gpu.stuck.is_set():
        pretend_gpu.stuck.set()
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
            threading.Timer(WATCHDOG_S, os.abort).start()


def _spoil(results: Sequence[Tensor]) -> None:
    for tensor in results:
        tensor.held.detach().fill_(-3)


_communicators: list[Communicator] = []
"""Communicators of this process, in the order of creation."""
_by_group: dict[Any, Communicator] = {}
_named: set[str] = set()


def install(_: object = None) -> None:
    pretend_gpu.install()
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, devices=[pretend_gpu.NAME])
    pretend_gpu.collective = _run
    dist.ProcessGroup.abort = _abort  # type: ignore[method-assign]


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    _communicators.append(Communicator(gloo, rank, size))
    return gloo


def _of(group: Any) -> Communicator:
    if group not in _by_group:
        backend = group._get_backend(torch.device(pretend_gpu.NAME))
        (_by_group[group],) = [each for each in _communicators if each.gloo is backend]
    return _by_group[group]


def _abort(group: Any) -> None:
    try:
        communicator = _of(group)
    except RuntimeError:  # a group of gloo for tensors in host memory
        return
    communicator.is_aborted = True
    pretend_gpu.stuck.clear()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a c10d operation on tensors of the device."""
    if func.namespace == "_c10d_functional":
        return _run_functional(func, args, kwargs)
    name = func._schema.name.removeprefix("c10d::")
    if name == "recv_any_source_":
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")
    leaves, _ = tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor):
            raise RuntimeError(f"No backend type associated with device type {leaf.device.type}")
    communicator = next(_of(_group_of(leaf)) for leaf in leaves if _is_group(leaf))
    communicator.refuse_if_aborted()
    inner = communicator.inner.boxed()
    plain_args, plain_kwargs = tree_map_only(PretendTensor, lambda t: t.held, (args, kwargs))
    swap: Callable[[Any], Any] = lambda leaf: inner if _is_group(leaf) else leaf  # noqa: E731
    swapped = {key: swap(value) for key, value in plain_kwargs.items()}
    made = _launched(communicator, func, *map(swap, plain_args), **swapped)
    tensors = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    *given, boxed = made if isinstance(made, tuple) else (made,)
    work = dist._Work.unbox(boxed)
    if name in _POINT_TO_POINT:
        ours = c10d.PythonCallbackWork(lambda _: communicator.wait(work, tensors) or True).boxed()
    else:
        communicator.wait(work, tensors)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(tensors)
        ours = c10d._create_work_from_future(done).boxed()
    by_held = {id(tensor.held): tensor for tensor in tensors}
    given = tree_map_only(Tensor, lambda t: by_held.get(id(t), t), given)
    return (*given, ours) if isinstance(made, tuple) else ours


def _run_functional(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a functional collective (used by DTensors), which names its group."""

    communicators: list[Communicator] = []

    def inner(leaf: Any) -> Any:
        if leaf.upper() in dist.ReduceOp.RedOpType.__members__ or leaf.startswith(f"{NAME}:"):
            return leaf
        communicator = _of(c10d._resolve_process_group(leaf))
        # A group of a later round can have the same name.
        name = f"{NAME}:{_communicators.index(communicator)}:{leaf}"
        communicator.refuse_if_aborted()
        communicators.append(communicator)
        if name not in _named:
            group = communicator.inner
            group._set_group_name(name)
            c10d._register_process_group(name, group)
            _named.add(name)
        return name

    def run() -> Any:
        made = pretend_gpu.run(func, *named)
        for tensor in tree_flatten(made)[0]:
            torch.ops._c10d_functional.wait_tensor(tensor.held)
        return made

    named = tree_map_only(str, inner, (args, kwargs))
    return _launched(communicators[0] if communicators else None, run)


def _launched(
    communicator: Communicator | None, operation: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return gloo's result. Where gloo raises because a peer is gone, wait until the communicator
    is aborted."""
    try:
        return operation(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, dist.DistBackendError) or cause_of(error) is not Cause.WORKER_LOST:
            raise
        if communicator is None or not communicator.is_aborted:
            _lose_peer()
            pretend_gpu.COMPUTING.catch_up()
        raise dist.DistBackendError("NCCL communicator was aborted") from error


def _is_group(leaf: Any) -> bool:
    return isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())


def _group_of(leaf: Any) -> Any:
    return dist.ProcessGroup.unbox(leaf)
