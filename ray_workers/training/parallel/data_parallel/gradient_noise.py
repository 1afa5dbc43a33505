"""Measures the gradient noise scale of a job during training.

The noise scale is tr(S) / |G|^2 with the gradient G and the covariance S of a sample's gradient:
the size of a batch whose mean gradient is half noise (McCandlish et al. 2018,
https://arxiv.org/abs/1812.06162, section 2.2). It is estimated from two batch sizes (appendix A.1),
the share of each rank and the global batch. Their squared norms take one pass over the gradient
before the exchange, and the exchange of one additional number.
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
"""Steps from one measurement to the next: on a GPU each measurement waits for the device."""
DECAY = 0.9
"""Decay of the separate means of |G|^2 and tr(S), because the mean of their ratio is biased."""


def estimates(
    own_squares: float, global_square: float, parts: Sequence[float], batch_size: int
) -> tuple[float, float]:
    """Unbiased estimates of (|G|^2, tr(S)) from one global batch; either may be negative.

    own_squares: the sum over the ranks of |h|^2, with the part h that a rank adds to the gradient
        of the global batch: its samples' mean gradient times its part of the samples.
    global_square: |sum of h|^2. parts: the ranks' parts of the batch, which add up to 1.

    For a rank with n of N samples, E|h|^2 = (n/N)^2 |G|^2 + (n/N) tr(S) / N, so with q the sum of
    the squared parts E(own_squares) = q |G|^2 + tr(S) / N, and E(global_square) is the same with
    q = 1. The shares need not be equal.
    """
    q = sum(part * part for part in parts)
    square = (global_square - own_squares) / (1 - q)
    return square, batch_size * (own_squares - q * global_square) / (1 - q)


class GradientNoise:
    """Means of the estimates over the last measurements."""

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
    """DDP that periodically measures the noise of its gradients without changing them."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._noise = GradientNoise()
        self._num_steps = 0
        """Number of steps in this group, so that all ranks measure in the same steps."""
        self._own_square: Tensor | None = None
        """While a step is measured, |h|^2 of the buckets that are exchanged already."""
        self._is_measured = False

    def form(self, world_size: int) -> None:
        super().form(world_size)
        self._num_steps = 0

    def _wrapped(self) -> DistributedDataParallel:
        wrapped = super()._wrapped()
        # A lambda: DDP requires an annotation with its own class, and no postponed annotation.
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
