"""Creates the session of a prepared script from the arguments of `prepare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer

from dray.train import reporting
from dray.train.prepared import division
from dray.train.prepared.divided_session import DividedSession
from dray.train.prepared.group import Group
from dray.train.prepared.session import TrainingSession


@dataclass(frozen=True)
class DivisionRequest:
    """The arguments of `prepare` that control how a model is divided, recomputed and compiled."""

    blocks: str | None
    tensor_plan: Mapping[str, ParallelStyle] | None
    shard: int | None
    tensor: int | None
    recompute: bool
    compile_blocks: bool


def session_of(
    group: Group,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    tracked: dict[str, Any],
    wanted: DivisionRequest,
    *,
    seed: int | None,
    broadcast_buffers: bool,
    keep: int,
) -> TrainingSession:
    """Create a session. If the arguments divide the model, this function is a collective operation
    that joins the group. If the arguments don't divide the model, the function does not join the
    group, because the number of ranks can still change."""
    named = None if wanted.blocks is None else division.blocks_named(models[0], wanted.blocks)
    if named is None and (wanted.recompute or wanted.compile_blocks):
        raise ValueError(
            "recompute and compile_blocks require blocks, the names of the model's blocks, such as "
            "'layers.*'"
        )
    axes = _axes_of(wanted, is_blocked=named is not None)
    blocks = named or ()
    how = {"recompute": wanted.recompute, "compiled": wanted.compile_blocks}
    if axes is None or not axes.is_divided:
        division.prepare_blocks(blocks, **how)
        return TrainingSession(
            *(group, models, optimizers, tracked), seed=seed, broadcast_buffers=broadcast_buffers
        )
    (model,), (optimizer,) = models, optimizers
    names = division.names_of(model, optimizer)
    division.prepare_blocks(blocks, **how)
    group.join()
    division.divide(model, blocks, wanted.tensor_plan, axes)
    division.retarget(optimizer, model, names)
    return DividedSession(group, model, optimizer, tracked, seed=seed, axes=axes, keep=keep)


def _axes_of(wanted: DivisionRequest, *, is_blocked: bool) -> division.Axes | None:
    """Return the axes, or None if the arguments don't divide the model."""
    shard, tensor = wanted.shard, wanted.tensor
    if not is_blocked and wanted.tensor_plan is None and max(shard or 1, tensor or 1) == 1:
        return None
    axes = division.axes_of(
        reporting.context().world_size, shard=shard, tensor=tensor, is_blocked=is_blocked
    )
    if axes.shard > 1 and not is_blocked:
        raise ValueError(
            "shard above 1 requires blocks, the names of the model's blocks, such as 'layers.*'"
        )
    return axes
