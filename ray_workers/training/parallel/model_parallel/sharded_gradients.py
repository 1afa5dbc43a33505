"""Gradients of a model that is divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dray.train.prepared.dtensor import local
from ray_workers.training.data.prefetcher import Piece, Share
from ray_workers.training.parallel.gradients import (
    EngineParts,
    GradientEngine,
    Pass,
    roots_of,
)
from ray_workers.training.parallel.model_parallel.device_mesh import Mesh


class ShardedGradientEngine(GradientEngine):
    """Computes the gradient of this rank's part of the model."""

    uses_ddp = False

    def __init__(
        self,
        parts: EngineParts,
        mesh: Mesh,
        is_asked_to_leave: Callable[[], bool],
        narrow: Callable[[Piece], Piece],
    ) -> None:
        """narrow: returns this rank's part of (inputs, targets)."""
        super().__init__(parts)
        self._mesh = mesh
        self._narrow = narrow
        self._sharded = parts.model if isinstance(parts.model, FSDPModule) else None
        self._is_asked_to_leave = is_asked_to_leave
        self._shares: dict[tuple[float, ...], Tensor] = {}
        self.preemption_requested = False
        """Whether any rank was asked to leave before the last step, so that all ranks save a
        checkpoint together."""

    def backward(self, work: Pass) -> None:
        mine, scale = work.share, work.scale
        self.keep_buffers()
        work.prepare(mine.batch.number)
        root = torch.full((), self._weight_of(mine), device=self._objective.slot.device)
        if scale is not None:
            root *= scale
        roots = roots_of(mine, root)
        *pieces, last = map(self._narrow, mine.micro_batches)
        self._exchange_gradients(False)
        for piece in pieces:
            torch.autograd.backward(self._objective(*piece), next(roots))
        self._exchange_gradients(True)
        loss = self._objective(*last)
        work.before_exchange()
        torch.autograd.backward(loss, next(roots))
        self._settle_gradients()

    def _weight_of(self, mine: Share) -> float:
        """Return the weight of a sample. Like DDP, FSDP divides gradients by the number of ranks.
        If several ranks compute the positions of a sample, each rank has the mean loss over its own
        positions."""
        num_sequence_parts = self._mesh.sizes["context"]
        return mine.batch.weight * self._mesh.num_exchanging / num_sequence_parts

    def _exchange_gradients(self, do: bool) -> None:
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(do)

    def _settle_gradients(self) -> None:
        """Perform the sums that DTensor has deferred for the gradients of parameters that are
        complete on every rank."""
        for parameter in self._parameters:
            grad = parameter.grad
            if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
                continue
            if grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    def take_loss(self) -> Tensor:
        return self._added_up(super().take_loss())

    def _added_up(self, carried: Tensor) -> Tensor:
        """Sum the loss over all ranks. The same all-reduce determines whether any rank was asked to
        leave, and sums the squares for the gradient norm."""
        asked = carried.new_full((), float(self._is_asked_to_leave()))
        # All ranks of a tensor-parallel group have computed the same loss.
        alike = self._mesh.num_exchanging * self._mesh.sizes["tensor"]
        square = self._own_square().to(carried)
        total = torch.cat((asked[None], square[None], (carried / alike).flatten()))
        dist.all_reduce(total)
        self.preemption_requested = bool(total[0] > 0.0)
        self._norm = total[1].sqrt()
        return total[2:].view_as(carried)

    def _own_square(self) -> Tensor:
        """Return this rank's part of the sum of squares of the gradient. An element that exists on
        n ranks counts as 1/n on each of them."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if not grads:
            return self._objective.slot.new_zeros(())
        squares = torch.stack(torch._foreach_norm([local(grad) for grad in grads])).square()
        shares = tuple(1 / _num_holders(grad) for grad in grads)
        if shares not in self._shares:  # cached, because copying to a GPU would wait for the GPU
            self._shares[shares] = squares.new_tensor(shares)
        return squares @ self._shares[shares]

    def grad_norm(self) -> Tensor:
        """Return the norm over all ranks' parts, which was computed when the loss was summed. The
        norm includes the loss scale."""
        return self._norm


def _num_holders(part: Tensor) -> int:
    """Return the number of ranks with the same part."""
    if not isinstance(part, DTensor):
        return 1
    sizes = zip(part.placements, part.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
