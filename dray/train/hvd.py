"""Horovod's calls, implemented with torch.distributed. A Horovod script changes only its import::

    import dray.train.hvd as hvd            # instead of: import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

The script runs as a job of dray, under torchrun, or on its own as rank 0 of 1. The first call
imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from dray.train.reporting import context, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")
State = TypeVar("State", bound="TorchState")
BUCKET_BYTES = 32 << 20
"""Maximum size of the gradients in one exchange."""
COMMIT_FILE = "state.pt"


class ReduceOp(Enum):
    """Reduction operations of an allreduce, with the names that Horovod uses."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX


class GradientType(Enum):
    """The type in which a `DistributedOptimizer` exchanges gradients."""

    none = "none"
    fp16 = "fp16"


Compression = GradientType
"""Horovod's name for `GradientType`."""


_is_initialized = False


def init() -> None:
    """Join the job's group, using the variables that are set by dray or torchrun. Without these
    variables, the group consists of this process only. Further calls do nothing."""
    global _is_initialized
    import torch
    from torch import distributed

    is_of_group = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    if is_of_group and not distributed.is_initialized():
        cuda = torch.cuda.is_available()
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    _is_initialized = True


def shutdown() -> None:
    """Leave the group."""
    global _is_initialized
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    _is_initialized = False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _is_initialized


def rank() -> int:
    """Return this process's rank in the group. Raises ValueError before `init`."""
    from torch import distributed

    return distributed.get_rank() if _is_grouped() else 0


def size() -> int:
    """Return the number of processes in the group. Raises ValueError before `init`."""
    from torch import distributed

    return distributed.get_world_size() if _is_grouped() else 1


def local_rank() -> int:
    """Return the index of this process's GPU: the index of this process among the group's processes
    on its node, or 0 if each process sees only its own GPU. Raises ValueError before `init`."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _is_grouped() else 0


def local_size() -> int:
    """Return the number of the group's processes on this node. Raises ValueError before `init`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _is_grouped() else 1


def _is_grouped() -> bool:
    from torch import distributed

    if not _is_initialized:
        raise ValueError("this process is not in a group yet: call hvd.init() first")
    return distributed.is_initialized()


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp = Average
) -> Tensor:
    """Return the average (or the result of another `op`) of a tensor over all ranks.

    average: Horovod's older form of `op`. name: ignored, because calls are matched by their order.
    The mean of integers is rounded towards zero.
    """
    return allreduce_(tensor.detach().clone(), average, name, op)


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp = Average
) -> Tensor:
    """Like `allreduce`, in place."""
    import torch
    from torch import distributed

    if average is not None:
        op = Average if average else Sum
    if size() == 1:
        return tensor
    ops = {Min: distributed.ReduceOp.MIN, Max: distributed.ReduceOp.MAX}
    with _contiguous(tensor.detach()) as sent:
        distributed.all_reduce(sent, ops.get(op, distributed.ReduceOp.SUM))
        if op is Average:
            exact = sent.is_floating_point() or sent.is_complex()
            sent.copy_(torch.div(sent, size(), rounding_mode=None if exact else "trunc"))
    return tensor


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension. Only the size of the first
    dimension can differ between ranks."""
    import torch
    from torch import distributed

    if size() == 1:
        return tensor.detach().clone()
    lengths = allgather_object(len(tensor))
    padded = tensor.detach().new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor.detach()
    found = [torch.empty_like(padded) for _ in lengths]
    distributed.all_gather(found, padded)
    return torch.cat([each[:length] for each, length in zip(found, lengths, strict=True)])


def allgather_object(value: R, name: str | None = None) -> list[R]:
    """Return the objects of all ranks, ordered by rank. Each object is pickled."""
    from torch import distributed

    found: list[Any] = [value] * size()
    if size() > 1:
        distributed.all_gather_object(found, value)
    return found


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the tensor of `root_rank` on every rank. The tensor must have the same shape on all
    ranks."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Like `broadcast`, in place."""
    from torch import distributed

    if size() > 1:
        with _contiguous(tensor.detach()) as sent:
            distributed.broadcast(sent, root_rank)
    return tensor


def broadcast_object(value: R, root_rank: int = 0, name: str | None = None) -> R:
    """Return the object of `root_rank` on every rank. The object is pickled."""
    from torch import distributed

    found: list[Any] = [value]
    if size() > 1:
        distributed.broadcast_object_list(found, root_rank)
    given: R = found[0]
    return given


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int
) -> None:
    """Copy the tensors of `root_rank` to every rank, in place. params: for example
    `model.state_dict()` or `model.named_parameters()`."""
    import torch

    for _, tensor in params.items() if isinstance(params, Mapping) else params:
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Copy the optimizer's state and options from `root_rank` to every rank."""
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if rank() != root_rank and state is not None:
        optimizer.load_state_dict(state)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: GradientType = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
) -> Any:
    """Make the optimizer exchange the gradients of all ranks before each `step`, and return the
    optimizer.

    named_parameters, backward_passes_per_step: ignored. The optimizer's own parameters are used,
    and the gradients of several backward passes accumulate until `step`. If a parameter has no
    gradient on a rank, that rank contributes zeros.

    This function adds two of Horovod's methods to the optimizer. `synchronize()` exchanges the
    gradients before `step`, for example to clip them. In the context `skip_synchronize()`, `step`
    does not exchange gradients.
    """
    exchange = _GradientExchange(optimizer, compression, op)
    optimizer.register_step_pre_hook(exchange.before_step)
    optimizer.synchronize = exchange.run  # type: ignore[attr-defined]
    optimizer.skip_synchronize = exchange.skipped  # type: ignore[attr-defined]
    return optimizer


class _GradientExchange:
    def __init__(self, optimizer: Optimizer, compression: GradientType, op: ReduceOp) -> None:
        self._optimizer = optimizer
        self._compression = compression
        self._op = op
        self._skips = False

    def before_step(self, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Exchange the gradients before the step. If the step has a closure, the closure computes
        the gradients during the step, so they are exchanged after each call of the closure."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            if not self._skips:
                self.run()
            return None

        def exchanging() -> Any:
            loss = closure()
            self.run()
            return loss

        return args[:1], {**kwargs, "closure": exchanging}

    @contextlib.contextmanager
    def skipped(self) -> Iterator[None]:
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def run(self) -> None:
        """Exchange the gradients of all parameters, bucket by bucket."""
        import torch

        if size() == 1:
            return
        bucket: list[Tensor] = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                grad = parameter.grad
                alike = not bucket or (bucket[0].dtype, bucket[0].device) == (
                    grad.dtype,
                    grad.device,
                )
                if not alike or sum(one.nbytes for one in bucket) + grad.nbytes > BUCKET_BYTES:
                    self._reduce(bucket)
                    bucket = []
                bucket.append(grad)
        self._reduce(bucket)

    def _reduce(self, grads: list[Tensor]) -> None:
        import torch

        if not grads:
            return
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        if self._compression is Compression.fp16:
            flat = flat.half()
        allreduce_(flat, op=self._op)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


@contextlib.contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor's values in the layout that gloo and NCCL need, and write them back."""
    sent = tensor.contiguous()
    yield sent
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


class TorchState:
    """The state from which `elastic.run` continues training after the loss of a rank.

    The arguments are models, optimizers and other objects with a `state_dict`, and plain values
    such as `epoch=0`. Each becomes an attribute.
    """

    def __init__(self, **given: Any) -> None:
        self._handled = {name for name, value in given.items() if hasattr(value, "state_dict")}
        self._values = set(given) - self._handled
        self._commits = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        for name, value in given.items():
            setattr(self, name, value)

    if TYPE_CHECKING:  # the attributes are the given names

        def __getattr__(self, name: str) -> Any: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call after the state of an earlier attempt is loaded, for example
        when the group's size has changed."""
        self._reset_callbacks += callbacks

    def commit(self) -> None:
        """Save the state on rank 0 as a checkpoint of the job. The next attempt continues from the
        newest commit, and repeats the steps after it. Does nothing outside of dray."""
        self._commits += 1
        if rank() == 0 and context().job_id is not None:
            import torch

            with tempfile.TemporaryDirectory() as folder:
                torch.save(self._taken(), Path(folder) / COMMIT_FILE)
                save_checkpoint(folder, self._commits)

    def load(self) -> bool:
        """Load the newest commit of an earlier attempt on rank 0. Returns False if no commit
        exists."""
        checkpoint = load_checkpoint() if rank() == 0 else None
        if checkpoint is not None:
            import torch

            self._take(torch.load(checkpoint.path / COMMIT_FILE, weights_only=False))
        return broadcast_object(checkpoint is not None)

    def sync(self) -> None:
        """Copy rank 0's state to every rank."""
        given = broadcast_object(self._taken() if rank() == 0 else None)
        if rank() != 0 and given is not None:
            self._take(given)

    def _taken(self) -> dict[str, Any]:
        return {
            "commits": self._commits,
            "handled": {name: getattr(self, name).state_dict() for name in self._handled},
            "values": {name: getattr(self, name) for name in self._values},
        }

    def _take(self, taken: dict[str, Any]) -> None:
        self._commits = taken["commits"]
        for name, state in taken["handled"].items():
            getattr(self, name).load_state_dict(state)
        for name, value in taken["values"].items():
            setattr(self, name, value)

    def reset(self) -> None:
        for callback in self._reset_callbacks:
            callback()


def _run(train: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """Make a training function start from the state of the newest commit, on every rank.

    If a rank is lost, the other ranks fail in their next collective. dray then restarts the script,
    which continues from the newest commit.
    """

    @functools.wraps(train)
    def resumed(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        init()
        was_there = state.load()
        state.sync()
        if was_there:
            state.reset()
        return train(state, *args, **kwargs)

    return resumed


class elastic:  # noqa: N801  (Horovod's name)
    """The equivalent of Horovod's module `elastic`."""

    TorchState = TorchState
    run = staticmethod(_run)
