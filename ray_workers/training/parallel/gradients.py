"""A rank's copy of the model, and the computation of a gradient that is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_workers.training.core import compat_torch
from ray_workers.training.core.workload import LossSum
from ray_workers.training.data.prefetcher import Share
from ray_workers.training.devices import on_gpu
from ray_workers.training.elastic import process_group

Autocast = Callable[[], AbstractContextManager[object]]


class Objective(nn.Module):
    """The model with its loss function, and a slot that carries the loss along with the gradients.
    The slot is a parameter that is always 1 and does not belong to an optimizer. The objective is
    `loss * slot`. Therefore, the gradient of the model's parameters is the gradient of the loss,
    and the slot's gradient is the loss itself, so the all-reduce of the gradients also sums the
    loss. On CPU, a separate all-reduce for the loss would take a tenth as long as a small step.

    If the step has additional metrics, the slot has one more element for each of them. The metrics
    are detached, so that they don't change the gradient of the model's parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_sum: LossSum,
        autocast: Autocast,
        metrics: Mapping[str, LossSum] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        device = next(model.parameters()).device
        shape = (1 + len(metrics),) if metrics else ()
        self.model = model
        self.slot = nn.Parameter(torch.ones(shape, device=device))
        self._loss_sum = loss_sum
        self._autocast = autocast
        self._metrics = tuple(metrics.values())

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            outputs = self.model(inputs)
            loss = self._loss_sum(outputs, targets)
            sums = [sum_of(outputs.detach(), targets) for sum_of in self._metrics]
        return (torch.stack((loss, *sums)) * self.slot).sum() if sums else loss * self.slot


def roots_of(share: Share, root: Tensor) -> Iterator[Tensor]:
    """Yield the initial gradient of the backward pass for each piece of a share. This gradient is
    zero for pieces that don't count."""
    nothing = torch.zeros_like(root)
    return (root if share.counts(piece) else nothing for piece in range(len(share.micro_batches)))


class EngineParts(NamedTuple):
    """The model of a `GradientEngine`, and how its loss is computed."""

    model: nn.Module
    loss_sum: LossSum
    autocast: Autocast
    metrics: Mapping[str, LossSum] = MappingProxyType({})
    """Additional metrics of each step."""


@dataclass(frozen=True)
class Pass:
    """Arguments of a backward pass."""

    shares: Sequence[Share]
    """This rank's shares."""
    scale: Tensor | None = None
    """Factor by which the gradients and the loss in the slot are multiplied; None for 1."""
    prepare: Callable[[int], None] = lambda _: None
    """Called before each share is computed, with the number of the share's batch."""
    before_exchange: Callable[[], None] = lambda: None
    """Called before the backward pass of the last micro-batch, which exchanges the gradients."""

    @property
    def share(self) -> Share:
        """The only share of this rank."""
        (mine,) = self.shares
        return mine


class GradientEngine:
    """Computes the exact gradient of a global batch. The gradient is the same on every rank.

    The engine outlives the groups that its rank joins: `form` wraps the model, and `disband`
    unwraps it.
    """

    uses_ddp = True
    """Whether torch's DDP exchanges the gradients."""
    has_samples = True
    """Whether the last gradient was computed from any samples. Without samples, the rank skips the
    step, because momentum and weight decay would still change its weights."""

    def __init__(self, parts: EngineParts) -> None:
        self._world_size, model = 1, parts.model
        self._objective = Objective(*parts)
        self._metric_names = tuple(parts.metrics)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = list(model.buffers())
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        self._ddp: DistributedDataParallel | None = None
        self._in_backward = False
        """Whether a pass over a share is unfinished. During a pass, the buffers might reflect
        samples that the weights don't reflect yet."""

    def form(self, world_size: int) -> None:
        """Join the current process group."""
        self._world_size = world_size
        if world_size > 1 and self.uses_ddp:
            if self._is_on_gpu:
                process_group.have_rank_0s([*self._parameters, *self._buffers])
            self._ddp = self._wrapped()

    def _wrapped(self) -> DistributedDataParallel:
        # On a GPU, `form` has sent the weights, because DDP would send them in place: an aborted
        # broadcast would leave undefined values in them.
        return DistributedDataParallel(
            self._objective, gradient_as_bucket_view=True, init_sync=not self._is_on_gpu
        )

    @property
    def _is_on_gpu(self) -> bool:
        return on_gpu(self._objective.slot)

    def disband(self) -> None:
        """Leave a broken group and discard the unfinished step."""
        if self._ddp is not None:
            compat_torch.unhook(self._ddp)
            self._ddp = None
        if self._in_backward:
            self.restore_buffers()
            self._in_backward = False
        self._objective.slot.grad = None
        self.forget_gradients()

    def keep_buffers(self) -> None:
        """Save the state that a forward pass changes, such as running means, so that an interrupted
        step can be repeated."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)
        self._in_backward = True

    def restore_buffers(self) -> None:
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)

    def backward(self, work: Pass) -> None:
        """Compute `.grad` as the sum, over all shares on all ranks, of the share's weight times the
        gradients of its samples.

        If the weight is 1 / global batch size, the sum is the mean over the batch, even if shares
        differ in size. Gradients are exchanged only during the backward pass of the last
        micro-batch.
        """
        mine = work.share
        if self._world_size > 1:
            self.keep_buffers()
        work.prepare(mine.batch.number)
        self._exchange(mine, mine.batch.weight, work.scale, work.before_exchange)

    def wait(self) -> None:
        """Wait until the gradient and the loss have arrived. Must be called before the gradient is
        used. Raises DistBackendError if the group was aborted."""
        process_group.wait_for_results(self._objective.slot.device)
        self._in_backward = False

    def _exchange(
        self, mine: Share, weight: float, scale: Tensor | None, before: Callable[[], None]
    ) -> None:
        # Multiply the weight by the world size, because DDP divides by the world size. Use the
        # product as the initial gradient of the backward pass: this also scales the slot, and
        # avoids a separate multiplication.
        root = torch.full((), weight * self._world_size, device=self._objective.slot.device)
        if scale is not None:
            root *= scale
        module = self._objective if self._ddp is None else self._ddp
        roots = roots_of(mine, root)
        *parts, last = mine.micro_batches
        for inputs, targets in parts:
            with nullcontext() if self._ddp is None else self._ddp.no_sync():
                torch.autograd.backward(module(inputs, targets), next(roots))
        loss = module(*last)
        before()
        torch.autograd.backward(loss, next(roots))

    def take_loss(self) -> Tensor:
        """Return the sum over all ranks of `weight` times the losses: a scalar or, if the step has
        additional metrics, a vector of this sum and the metrics. Can be called once after
        `backward`. The result might share memory with DDP's bucket, so read or copy it before the
        next pass overwrites it.
        """
        carried = self._objective.slot.grad
        assert carried is not None
        self._objective.slot.grad = None
        return carried

    def divided(self, carried: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the additional metrics, in a result of `take_loss`."""
        if carried.ndim == 0:
            return carried, {}
        loss, *measured = carried
        return loss, dict(zip(self._metric_names, measured, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements of the gradient."""
        return sum(parameter.numel() for parameter in self._parameters)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the complete gradient, which equals the result of
        `clip_grad_norm_`."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return norm

    def step_metrics(self) -> dict[str, float]:
        """Return additional metrics of the latest step."""
        return {}

    def forget_gradients(self) -> None:
        """Clear the gradients. For a small model, this method is 15 times as fast as
        `zero_grad`."""
        for parameter in self._parameters:
            parameter.grad = None

    def settle_buckets(self, shares: Callable[[], Sequence[Share]]) -> None:
        """Run a backward pass, so that DDP sorts its buckets before the first step. A collective.
        After its first backward pass, DDP sorts the gradients into new buckets, in the order in
        which they became ready. In a ring all-reduce with more than two ranks, the position of a
        gradient determines the order in which the ranks' gradients are added. Without this pass,
        whose gradients are discarded, the first step after a resume would add the gradients in a
        different order than an uninterrupted run.
        """
        if self._ddp is not None:
            (mine,) = shares()
            self.keep_buffers()
            self._exchange(mine, 0.0, None, lambda: None)
            self.take_loss()
            self.forget_gradients()
            self.restore_buffers()
            self._in_backward = False
