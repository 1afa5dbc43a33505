"""Stages of a model on several ranks, with `torch.distributed.pipelining`.

All micro-batches of a share have the same size, because the stages exchange tensors of a fixed
shape. If necessary, the last micro-batch is padded with samples that don't count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ray_workers.training.core.workload import LossSum
from ray_workers.training.parallel.gradients import EngineParts, Pass
from ray_workers.training.parallel.model_parallel.device_mesh import Mesh
from ray_workers.training.parallel.model_parallel.sharded_gradients import ShardedGradientEngine
from ray_workers.training.parallel.strategy import StrategyContext

IGNORED = -100
"""Target that `torch.nn.functional.cross_entropy` ignores (the default of `ignore_index`)."""
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
PER_STAGE = 2
"""Number of micro-batches per stage if the document does not specify a micro-batch size. With this
number, ranks are idle for at most a third of a step."""


class Stages(nn.Module):
    """The stages of one rank. Parameters have the same names as in the complete model, and each
    parameter belongs to only one stage."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages:
            yield from stage.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for stage in self.stages:
            yield from stage.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for stage in self.stages:
            found.update(stage.state_dict(*args, **kwargs))
        return found


class Pipeline:
    """The schedule of this rank's stages, in training and evaluation."""

    def __init__(
        self, stages: Mapping[int, nn.Module], num_stages: int, mesh: Mesh, given: StrategyContext
    ) -> None:
        """stages: this rank's stages, keyed by number."""
        options = given.spec.parallel
        self._modules = stages
        self._num_stages = num_stages
        self._given = given
        self._group = mesh.group("pipeline")
        self._size = mesh.sizes["pipeline"]
        self.is_first, self.is_last = 0 in stages, num_stages - 1 in stages
        num_shares = mesh.sizes["data"] * mesh.sizes["shard"]
        largest = -(-given.spec.train.global_batch_size // num_shares)
        self.num_pieces = num_pieces(given.spec.train.micro_batch_size, largest, self._size)
        self.piece_size = -(-largest // self.num_pieces)
        self._losses = _Losses()
        self._schedule = self._scheduled(options.schedule, self.num_pieces, self._losses)
        self._num_predicted = _multiple(given.spec.train.micro_batch_size or largest, self._size)
        """Number of samples whose outputs are computed at a time. The number is constant, because a
        schedule for a new shape first runs a pass to infer the shapes of the tensors that stages
        exchange. Ranks that already have a schedule for this shape would not take part in the
        collectives of the pass."""
        self._forward: Any = None
        """The schedule for the forward pass only."""

    def _scheduled(self, name: str, pieces: int, losses: _Losses | None) -> Any:
        stages = [
            PipelineStage(module, number, self._num_stages, self._given.device, group=self._group)
            for number, module in self._modules.items()
        ]
        one_only = name in ("gpipe", "1f1b") and len(stages) == 1
        return SCHEDULES[name](
            stages[0] if one_only else stages, pieces, loss_fn=losses, scale_grads=False
        )

    def train(
        self, inputs: Tensor, targets: Tensor, loss_sum: LossSum, weight: float | Tensor
    ) -> Tensor:
        """Compute the gradients of `weight` times the sum of the losses. Returns the product, or 0
        on a rank without the last stage. inputs, targets: up to `num_pieces * piece_size`
        samples."""
        size = self.num_pieces * self.piece_size
        self._losses.of, self._losses.weight = loss_sum, weight
        given = (_filled_up(inputs, size, None),) if self.is_first else ()
        losses: list[Tensor] = []
        expected = {"target": _filled_up(targets, size, IGNORED), "losses": losses}
        with self._given.autocast():
            self._schedule.step(*given, **(expected if self.is_last else {}), return_outputs=False)
        if not self.is_last:
            return torch.zeros((), device=inputs.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs on the rank with the last stage, and None on other ranks. inputs: at
        most `micro_batch_size` samples if it is set, otherwise at most a rank's share."""
        if self._forward is None:
            name = "gpipe" if len(self._modules) == 1 else "interleaved"
            self._forward = self._scheduled(name, self._size, None)
        given = (_filled_up(inputs, self._num_predicted, None),) if self.is_first else ()
        outputs = self._forward.step(*given)
        return outputs[: len(inputs)] if self.is_last else None


class _Losses:
    """The loss function that the schedule calls with the outputs and targets of a micro-batch."""

    of: LossSum
    weight: float | Tensor = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.of(outputs, targets) * self.weight


class PipelineGradientEngine(ShardedGradientEngine):
    """Computes the gradient of this rank's stages."""

    def __init__(self, pipeline: Pipeline, parts: EngineParts, *more: Any) -> None:
        """more: the remaining arguments of `ShardedGradientEngine`, in order."""
        super().__init__(parts, *more)
        self._loss_sum = parts.loss_sum
        self._pipeline = pipeline
        self._carried: Tensor | None = None

    def backward(self, work: Pass) -> None:
        mine, scale = work.share, work.scale
        self.keep_buffers()
        work.prepare(mine.batch.number)
        work.before_exchange()
        (piece,) = map(self._narrow, mine.micro_batches)
        weight = self._weight_of(mine) if scale is None else scale * self._weight_of(mine)
        self._carried = self._pipeline.train(*piece, self._loss_sum, weight)
        self._settle_gradients()

    def take_loss(self) -> Tensor:
        assert self._carried is not None
        return self._added_up(self._carried)


def num_pieces(micro_batch_size: int | None, share: int, num_ranks: int) -> int:
    """Return the number of micro-batches of a share. The number is a multiple of the number of
    ranks, as required by the interleaved schedules."""
    wanted = PER_STAGE * num_ranks if micro_batch_size is None else -(-share // micro_batch_size)
    return _multiple(wanted, num_ranks)


def _multiple(number: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `number`."""
    return -(-number // of) * of


def _filled_up(samples: Tensor, size: int, with_: int | None) -> Tensor:
    """Pad to `size` samples with copies of the last sample or with a constant."""
    missing = size - len(samples)
    if not missing:
        return samples
    more = samples[-1:].expand(missing, *samples.shape[1:])
    return torch.cat((samples, more if with_ is None else torch.full_like(more, with_)))
