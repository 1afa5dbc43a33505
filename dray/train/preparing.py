"""`prepare` and the other calls of a prepared script; see docs/guides/recover-in-place.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from dray.train import reporting
from dray.train.reporting import Context
from dray.train.seeding import seed_from

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from dray.train.prepared.group import Group
    from dray.train.prepared.loader import PreparedLoader
    from dray.train.prepared.saving import Saver
    from dray.train.prepared.session import TrainingSession

CHECKPOINT_EVERY_S = 300.0


@dataclass(frozen=True)
class InitOptions:
    """The arguments of `init`."""

    seed: int | None
    checkpoint_every_steps: int | None
    checkpoint_every_s: float | None
    keep: int


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a prepared script."""

    step: int
    """Number of optimizer steps done."""
    epoch: int
    """Epoch of the current batch, from 0."""
    batch: int
    """Index of the current batch in its epoch, from 0. In a process that starts in the middle of an
    epoch, `enumerate(loader)` starts from 0, but `batch` does not."""
    total_steps: int | None
    """Total number of training steps, if known."""


@dataclass
class PreparedParts:
    """The arguments of `prepare`, and the session that drives the script."""

    session: TrainingSession
    saver: Saver
    loader: PreparedLoader | None


@dataclass
class _State:
    """The settings and objects that the calls of this process have passed so far."""

    new_group: Callable[[], Group] | None = None
    """Set by dray in a process that it starts; None otherwise, as under torchrun."""
    options: InitOptions | None = None
    tracked: dict[str, Any] | None = None
    prepared: PreparedParts | None = None
    parallel: Mapping[str, Any] | None = None
    """The `parallel` of the job document; None outside of dray."""
    num_epochs: int | None = None


_state = _State()


def drive(new_group: Callable[[], Group], parallel: Mapping[str, Any] | None = None) -> None:
    """Set the group that `prepare` joins, and the job document's `parallel`. dray calls this
    function before it runs a script."""
    global _state
    _state = _State(new_group=new_group, parallel=parallel)


def init(
    *,
    seed: int | None = None,
    checkpoint_every_steps: int | None = None,
    checkpoint_every_s: float | None = CHECKPOINT_EVERY_S,
    keep: int = 2,
) -> Context:
    """Make this script recover in place. Call `init` first, and call `prepare` before the loop.

    seed: determines the order of the data and all random numbers. This call seeds the global
        generators of Python, NumPy and torch from the seed and the rank, and they are seeded again
        for each batch. By default, the order of the data is derived from torch's initial seed.
    checkpoint_every_steps, checkpoint_every_s: save a checkpoint after this many steps or seconds,
        whichever comes first, while training continues. None disables a limit.
    keep: how many of the newest checkpoints to keep.

    Raises ValueError for a number that is out of range, and RuntimeError if called twice.
    """
    if _state.options is not None:
        raise RuntimeError("init() was called twice: call it once per process")
    if checkpoint_every_steps is not None and checkpoint_every_steps < 1:
        raise ValueError(f"checkpoint_every_steps must be at least 1, not {checkpoint_every_steps}")
    if checkpoint_every_s is not None and not checkpoint_every_s > 0:
        raise ValueError(f"checkpoint_every_s must be above 0, not {checkpoint_every_s}")
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    _state.options = InitOptions(seed, checkpoint_every_steps, checkpoint_every_s, keep)
    context = reporting.context()
    if seed is not None:
        seed_from("script", seed, context.rank)
    return context


def track(name: str, tracked: Any) -> None:
    """Save an object with `state_dict` and `load_state_dict` in checkpoints, and pass its state to
    replacement processes. Call this before `prepare`."""
    _check_init("track")
    if _state.prepared is not None:
        raise RuntimeError("call track() before prepare(), which restores tracked objects")
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(tracked, method, None)):
            raise ValueError(f"track() was given {name}, which has no {method}()")
    _state.tracked = {**(_state.tracked or {}), name: tracked}


Model = TypeVar("Model", bound="nn.Module")
AnyOptimizer = TypeVar("AnyOptimizer", bound="Optimizer")


@overload
def prepare(
    model: Model,
    optimizer: AnyOptimizer,
    loader: DataLoader[Any],
    *,
    broadcast_buffers: bool = True,
    blocks: str | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    shard: int | None = None,
    tensor: int | None = None,
    recompute: bool = False,
    compile_blocks: bool = False,
    **tracked: Any,
) -> tuple[Model, AnyOptimizer, PreparedLoader]: ...


@overload
def prepare(
    model: Model,
    optimizer: AnyOptimizer,
    loader: None = None,
    *,
    broadcast_buffers: bool = True,
    blocks: str | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    shard: int | None = None,
    tensor: int | None = None,
    recompute: bool = False,
    compile_blocks: bool = False,
    **tracked: Any,
) -> tuple[Model, AnyOptimizer, None]: ...


@overload
def prepare(
    model: Sequence[nn.Module],
    optimizer: Sequence[Optimizer],
    loader: DataLoader[Any],
    *,
    broadcast_buffers: bool = True,
    **tracked: Any,
) -> tuple[list[nn.Module], list[Optimizer], PreparedLoader]: ...


@overload
def prepare(
    model: Sequence[nn.Module],
    optimizer: Sequence[Optimizer],
    loader: None = None,
    *,
    broadcast_buffers: bool = True,
    **tracked: Any,
) -> tuple[list[nn.Module], list[Optimizer], None]: ...


def prepare(
    model: Any,
    optimizer: Any,
    loader: DataLoader[Any] | None = None,
    *,
    broadcast_buffers: bool = True,
    blocks: str | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    shard: int | None = None,
    tensor: int | None = None,
    recompute: bool = False,
    compile_blocks: bool = False,
    **tracked: Any,
) -> tuple[Any, Any, PreparedLoader | None]:
    """Join the other ranks and restore the newest state, from a peer or from a checkpoint.

    Returns the model and the optimizer themselves, and a loader that yields this rank's share of
    each global batch: the loader's `batch_size` is the total over all ranks. After this call,
    gradients are averaged over the ranks at the end of each backward pass.

    model, optimizer: one of each, or a list of each. Call `prepare` again before the loop to add
        models; pass the loader to only one of the calls. Every optimizer that updates parameters of
        these models must be passed.
    broadcast_buffers: whether all ranks use the buffers of rank 0, such as running means, as in
        DDP. If false, a process that replaces a lost process gets the buffers of another rank.
        blocks: a pattern for the names of the model's blocks, such as `layers.*`. Blocks are the
        units that are sharded (FSDP2), recomputed in the backward pass if `recompute` is set, and
        compiled if `compile_blocks` is set.
    tensor_plan: torch's parallel styles by module name, for ranks that divide each layer.
    shard, tensor: how many ranks a model is sharded among, and how many compute each layer
        together. Further ranks are replicas. A job document sets both in `parallel`. Outside of
        dray, if there are blocks, `shard` defaults to the number of ranks divided by `tensor`.
    tracked: further objects with `state_dict` and `load_state_dict`, such as `scheduler=` and
        `scaler=`; a list of several is tracked as `scheduler.0`, `scheduler.1` and so on.

    A model is divided in place. The model's optimizer must not have taken a step; the optimizer
    keeps its options, but gets the divided parameters. Raises ValueError for a model without
    parameters, a loader or model that can't be divided, and names that match no module. Raises
    RuntimeError if called after the first batch, or with a second loader."""
    _check_init("prepare")
    models, optimizers = _listed(model), _listed(optimizer)
    is_divided = any((blocks, tensor_plan, shard, tensor, recompute, compile_blocks))
    if is_divided and len(models) + len(optimizers) != 2:
        raise ValueError("prepare() can divide only a single model that has a single optimizer")
    if _state.prepared is not None:
        if is_divided or tracked:
            raise ValueError(
                "prepare() was called again: only the first call can track objects or divide a "
                "model"
            )
        return model, optimizer, _prepare_more(_state.prepared, models, optimizers, loader)
    for name, given in tracked.items():
        if isinstance(given, list | tuple):
            for number, one in enumerate(given):
                track(f"{name}.{number}", one)
        elif given is not None:
            track(name, given)
    from dray.train.prepared import group as groups
    from dray.train.prepared import saving, starting
    from dray.train.prepared.loader import PreparedLoader

    options = _state.options
    assert options is not None
    shard, tensor = _sizes(shard, tensor)
    session = starting.session_of(
        *((_state.new_group or groups.group_of_environment)(), models, optimizers),
        _state.tracked or {},
        starting.DivisionRequest(blocks, tensor_plan, shard, tensor, recompute, compile_blocks),
        seed=options.seed,
        broadcast_buffers=broadcast_buffers,
        keep=options.keep,
    )
    session.begin(lambda: saving.load(session.group))
    saver = saving.Saver(
        session,
        every_steps=options.checkpoint_every_steps,
        every_s=options.checkpoint_every_s,
        keep=options.keep,
    )
    session.on_batch = saver.at_batch
    divided = None if loader is None else PreparedLoader(loader, session)
    _state.prepared = PreparedParts(session, saver, divided)
    return model, optimizer, divided


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _prepare_more(
    prepared: PreparedParts,
    models: list[nn.Module],
    optimizers: list[Optimizer],
    loader: DataLoader[Any] | None,
) -> PreparedLoader | None:
    """Add the arguments of another `prepare` call; returns the prepared loader, if any."""
    from dray.train.prepared.divided_session import DividedSession
    from dray.train.prepared.loader import PreparedLoader

    session = prepared.session
    if isinstance(session, DividedSession):
        raise ValueError("prepare() can't be called again after a call that divided a model")
    if session.has_begun:
        raise RuntimeError("prepare() was called after the first batch: call it before the loop")
    if loader is not None and prepared.loader is not None:
        raise RuntimeError("prepare() was given a second loader: a script can have only one")
    session.add(models, optimizers)
    if loader is None:
        return None
    prepared.loader = PreparedLoader(loader, session)
    return prepared.loader


def _sizes(shard: int | None, tensor: int | None) -> tuple[int | None, int | None]:
    """Return the axes' sizes. Sizes in the document, which supervision uses, take precedence."""
    document = _state.parallel
    if document is None:
        return shard, tensor
    for name, given in (("shard", shard), ("tensor", tensor)):
        if given not in (None, document[name]):
            raise ValueError(
                f"prepare() was given {name}={given}, but parallel.{name} in the job document is "
                f"{document[name]}: change the document, or leave {name} out of the call"
            )
    return document["shard"], document["tensor"]


def epochs(number: int) -> Iterator[int]:
    """Count epochs from the job's current epoch up to `number`. Use it around the loop over the
    loader, as in `for epoch in epochs(3)`."""
    prepared = check_prepared("epochs")
    if prepared.loader is None:
        raise RuntimeError("epochs() counts passes over a loader: pass a loader to prepare()")
    _state.num_epochs = number
    first = prepared.session.position.epoch
    for epoch in range(first, number):
        if prepared.session.is_over and epoch > first:
            return
        prepared.loader.skip_to(epoch)
        yield epoch


def progress(*, total_steps: int | None = None) -> TrainingProgress:
    """Return the training progress. total_steps: total number of steps, after which the loader
    ends. The remaining time is computed from this number. Not needed with `epochs`."""
    prepared = check_prepared("progress")
    session = prepared.session
    if total_steps is not None:
        session.total_steps = total_steps
    position = session.position
    return TrainingProgress(session.steps, position.epoch, position.batch, total_steps_of(prepared))


def no_sync() -> AbstractContextManager[None]:
    """Return a context in which backward passes accumulate gradients without exchanging them. The
    next backward pass outside of the context exchanges the accumulated gradients."""
    return check_prepared("no_sync").session.no_exchange()


def checkpoint() -> None:
    """Save a checkpoint before the next batch, while training continues. Call this function either
    on every rank or only on rank 0."""
    check_prepared("checkpoint").saver.ask()


def is_prepared() -> bool:
    """Whether this process has called `prepare`."""
    return _state.prepared is not None


def finish() -> None:
    """Wait for the last checkpoint and the other ranks, at the end of a successful script."""
    prepared = _state.prepared
    if prepared is not None:
        prepared.session.finish()
        prepared.saver.end()


def total_steps_of(prepared: PreparedParts) -> int | None:
    """Return the total number of training steps; None if it is unknown."""
    if prepared.session.total_steps is not None:
        return prepared.session.total_steps
    if _state.num_epochs is None or prepared.loader is None:
        return None
    session, position = prepared.session, prepared.session.position
    if not session.steps:
        return None
    per_epoch = len(prepared.loader)
    # A step can consist of several batches.
    batches = position.epoch * per_epoch + min(position.batch + 1, per_epoch)
    return max(session.steps, round(_state.num_epochs * per_epoch * session.steps / batches))


def _check_init(call: str) -> None:
    if _state.options is None:
        raise RuntimeError(f"call train.init() before {call}()")


def check_prepared(call: str) -> PreparedParts:
    """Return the result of `prepare`. Raises RuntimeError if it was not called before this
    call."""
    if _state.prepared is None:
        raise RuntimeError(f"call train.prepare() before {call}()")
    return _state.prepared
