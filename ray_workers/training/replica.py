"""One rank's copy of the model, and the gradient that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LossSum = Callable[[Tensor, Tensor], Tensor]
Autocast = Callable[[], AbstractContextManager[object]]


class Objective(nn.Module):
    """The model with its loss, and a slot in which the loss travels with the gradients.

    The slot is a parameter that is always 0 and that no optimizer knows. The objective is
    `loss * (scale + slot)`: its value and the model's gradient are those of `loss * scale`, and
    the slot's gradient is `loss`. So the all-reduce of the gradients adds the loss up as well;
    one of its own costs a small step on CPU about a tenth of its time.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum, autocast: Autocast) -> None:
        super().__init__()
        device = next(model.parameters()).device
        self.model = model
        self.slot = nn.Parameter(torch.zeros((), device=device))
        self._loss_sum = loss_sum
        self._autocast = autocast

    def forward(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        with self._autocast():
            loss = self._loss_sum(self.model(inputs), targets)
        if scale == 0.0:
            return loss * 0.0 + self.slot * 0.0  # takes part in the exchange, with zeros
        return loss * (self.slot + scale)


class Replica:
    """Computes the exact mean gradient of a global batch, the same on every rank."""

    def __init__(
        self, model: nn.Module, loss_sum: LossSum, autocast: Autocast, world_size: int
    ) -> None:
        self._world_size = world_size
        self._objective = Objective(model, loss_sum, autocast)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ddp: DistributedDataParallel | None = None
        if world_size > 1:
            self._ddp = DistributedDataParallel(self._objective, gradient_as_bucket_view=True)

    def backward(self, parts: Sequence[tuple[Tensor, Tensor]], num_global: int) -> None:
        """Leave in `.grad` the mean gradient over the global batch of `num_global` samples.

        parts: this rank's (inputs, targets), one micro-batch after the other. Shares differ in
        size, so each rank adds its samples up and divides by `num_global`; times world size,
        because DDP divides by that. Gradients are exchanged with the last micro-batch only.
        """
        scale = self._world_size / num_global
        for inputs, targets in parts[:-1]:
            with nullcontext() if self._ddp is None else self._ddp.no_sync():
                torch.autograd.backward(self._forward(inputs, targets, scale))
        torch.autograd.backward(self._forward(*parts[-1], scale))

    def backward_nothing(self, part: tuple[Tensor, Tensor]) -> None:
        """Take part in the exchange without a share of the batch: `part` counts for nothing."""
        torch.autograd.backward(self._forward(*part, 0.0))

    def take_loss(self, num_global: int) -> Tensor:
        """The mean loss over the global batch, once, after `backward`. A scalar of its own."""
        carried = self._objective.slot.grad
        assert carried is not None
        self._objective.slot.grad = None
        return torch.mul(carried, self._world_size / num_global)

    def grad_norm(self) -> Tensor:
        """2-norm of the gradient as a whole (what `clip_grad_norm_` measures)."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return norm

    def settle_buckets(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Bring a model that was just wrapped to where DDP is from its second step on.

        After its first backward pass DDP sorts the gradients into buckets anew, in the order
        they became ready. In a ring all-reduce of more than two ranks, where a gradient lies
        decides the order in which the ranks' parts are added. Without this pass, whose gradients
        are thrown away, the first step after a resume would add in another order than the run
        that was never interrupted.
        """
        if self._ddp is not None:
            self.backward(parts, num_global=1)
            self._objective.zero_grad()

    def _forward(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        module = self._objective if self._ddp is None else self._ddp
        objective: Tensor = module(inputs, targets, scale)
        return objective
