"""Measures the gradient noise scale of a job during training.

The noise scale is tr(S) / |G|^2, where G is the gradient and S is the covariance of a sample's
gradient. The noise scale is the size of a batch whose mean gradient is half noise (McCandlish et
al. 2018, https://arxiv.org/abs/1812.06162, section 2.2). The estimate uses two batch sizes
(appendix A.1): the share of each rank, and the global batch. To compute the squared norms, each
rank makes one pass over its gradient before the exchange, and exchanges one additional number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ray_workers.shared.contracts import NOISE_SCALE
from ray_workers.training.core.compat_torch import GradBucket
from ray_workers.training.data.sampler import share
from ray_workers.training.parallel.gradients import EngineParts, GradientEngine, Pass

EVERY = 10
"""Number of steps between two measurements. On a GPU, each measurement waits for the device."""
DECAY = 0.9
"""Decay of the means of |G|^2 and tr(S). The two quantities are averaged separately, because the
mean of their ratio would be biased."""


def estimates(
    own_squares: float, global_square: float, parts: Sequence[float], batch_size: int
) -> tuple[float, float]:
    """Return unbiased estimates of (|G|^2, tr(S)) from one global batch. Either estimate can be
    negative.

    own_squares: the sum over the ranks of |h|^2, where h is a rank's contribution to the gradient
    of the global batch: the mean gradient of its samples, multiplied by its fraction of the
    samples. global_square: |sum of h|^2. parts: the ranks' parts of the batch, which sum to 1.

    For a rank with n of N samples, E|h|^2 = (n/N)^2 |G|^2 + (n/N) tr(S) / N. If q is the sum of the
    squared parts, then E(own_squares) = q |G|^2 + tr(S) / N, and E(global_square) is the same with
    q = 1. The shares don't have to be equal.
    """
    q = sum(part * part for part in parts)
    square = (global_square - own_squares) / (1 - q)
    return square, batch_size * (own_squares - q * global_square) / (1 - q)


class GradientNoise:
    """Decaying means of the estimates."""

    def __init__(self) -> None:
        self._square = self._variance = self._weight = 0.0

    def add(self, square: float, variance: float) -> None:
        self._square = DECAY * self._square + (1 - DECAY) * square
        self._variance = DECAY * self._variance + (1 - DECAY) * variance
        self._weight = DECAY * self._weight + (1 - DECAY)

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None while the estimates are too noisy."""
        if self._square <= 0 or self._variance < 0:
            return None
        return self._variance / self._square


class NoiseMeasuringGradientEngine(GradientEngine):
    """DDP that periodically measures the noise of its gradients, without changing them."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._noise = GradientNoise()
        self._num_steps = 0
        """Number of steps in this group. All ranks use this number to decide when to measure, so
        they measure in the same steps."""
        self._own_square: Tensor | None = None
        """During a measurement: |h|^2 of the buckets that have already been exchanged."""
        self._is_measured = False

    def form(self, world_size: int) -> None:
        super().form(world_size)
        self._num_steps = 0

    def _wrapped(self) -> DistributedDataParallel:
        wrapped = super()._wrapped()
        # Use a lambda, because DDP rejects functions with postponed annotations.
        wrapped.register_comm_hook(None, lambda _, bucket: self._exchange_bucket(bucket))
        return wrapped

    def _exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._own_square is not None:
            slot = self._objective.slot
            grads = [
                gradient
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
                if parameter is not slot
            ]
            if grads:
                norms = torch.stack(torch._foreach_norm(grads))
                self._own_square += (norms / self._world_size).square().sum()
        summed: torch.futures.Future[Tensor] = allreduce_hook(None, bucket)  # type: ignore[arg-type]
        return summed

    def backward(self, work: Pass) -> None:
        self._is_measured = False
        batch = work.share.batch
        measures = self._num_steps % EVERY == 0 and 1 < self._world_size <= batch.num_global
        self._num_steps += 1
        if not measures:
            super().backward(work)
            return
        self._own_square = torch.zeros((), device=self._objective.slot.device)
        super().backward(work)
        own_squares, self._own_square = self._own_square, None
        dist.all_reduce(own_squares)
        ends = [share(batch.num_global, rank, self._world_size) for rank in range(self._world_size)]
        parts = [(stop - start) / batch.num_global for start, stop in ends]
        global_square = self.grad_norm().square()
        squares = torch.stack((own_squares, global_square)).tolist()
        if all(map(_is_usable, squares)):
            self._noise.add(*estimates(squares[0], squares[1], parts, batch.num_global))
            self._is_measured = True

    def disband(self) -> None:
        super().disband()
        self._own_square = None

    def step_metrics(self) -> dict[str, float]:
        scale = self._noise.scale
        if not self._is_measured or scale is None:
            return {}
        return {NOISE_SCALE: scale}


def _is_usable(square: float) -> bool:
    return 0.0 < square < float("inf")
