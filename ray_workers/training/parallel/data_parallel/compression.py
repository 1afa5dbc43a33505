"""Compression of the exchanged gradients, implemented as DDP communication hooks.

A compressor keeps the part of a gradient that it did not send, and adds this remainder to the
gradient of the next step. Each rank has its own remainder, which is reset to zero whenever a group
is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dray import spec
from ray_workers.training.core import compat_torch
from ray_workers.training.core.compat_torch import GradBucket
from ray_workers.training.data.prefetcher import Share
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.parallel.gradients import EngineParts, GradientEngine
from ray_workers.training.parallel.strategy import StrategyContext

FIRST_RATIO = 0.25
"""Fraction of the elements that is sent at the beginning of topk's warm-up, as in the authors'
code."""
Gradients = torch.futures.Future[Tensor]


def takes_momentum(options: spec.Compression | None) -> bool:
    """Whether the compressor, rather than the optimizer, applies the momentum. topk accumulates the
    gradients that it sends later, and the optimizer's momentum would count these gradients
    twice."""
    return options is not None and options.name == "topk"


class CompressedGradientEngine(GradientEngine):
    """DDP with compressed gradients. The loss is exchanged separately, uncompressed."""

    def __init__(
        self, parts: EngineParts, options: spec.Compression, *, momentum: float, seed: int
    ) -> None:
        """momentum: the optimizer's momentum, which topk itself applies (`takes_momentum`)."""
        super().__init__(parts)
        self._options = options
        self._hook_momentum = momentum
        self._seed = seed
        self._velocities: list[Tensor] = []
        """Velocities of the gradients, only used if the group has a single rank and therefore no
        hook that keeps them."""

    def form(self, world_size: int) -> None:
        super().form(world_size)
        self._velocities = []

    def _exchange(
        self, mine: Share, weight: float, scale: Tensor | None, before: Callable[[], None]
    ) -> None:
        super()._exchange(mine, weight, scale, before)
        if self._ddp is None and takes_momentum(self._options) and self._hook_momentum:
            self._add_momentum()

    @torch.no_grad()
    def _add_momentum(self) -> None:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if not self._velocities:
            self._velocities = [torch.zeros_like(grad) for grad in grads]
        torch._foreach_mul_(self._velocities, self._hook_momentum)
        torch._foreach_add_(self._velocities, grads)
        torch._foreach_copy_(grads, self._velocities)

    def _wrapped(self) -> DistributedDataParallel:
        compat_torch.exclude_from_ddp(self._objective, "slot")
        wrapped = DistributedDataParallel(
            self._objective, gradient_as_bucket_view=True, bucket_cap_mb=self._bucket_cap_mb
        )
        compress(wrapped, self._options, momentum=self._hook_momentum, seed=self._seed)
        return wrapped

    @property
    def _bucket_cap_mb(self) -> int | None:
        """The bucket size in MiB: a single bucket for the whole gradient if only a small part of it
        is sent. PowerSGD's hook starts its second exchange in the thread that completed the first
        exchange, and blocks this thread until it has finished. Since gloo has two threads, two
        concurrent buckets would deadlock."""
        if self._options.name in ("fp16", "bf16"):
            return None
        return 1 + sum(p.nbytes for p in self._parameters) // 2**20

    def take_loss(self) -> Tensor:
        carried = super().take_loss()
        if self._world_size > 1:
            dist.all_reduce(carried)
            carried /= self._world_size
        return carried


def compressed_or_plain(given: StrategyContext, parts: EngineParts) -> GradientEngine:
    """Return the engine for a replicated model, with compression if the document sets it."""
    options = given.spec.compression
    if options is None:
        return GradientEngine(parts)
    train = given.spec.train
    seed = derive_seed("sync", train.seed)
    return CompressedGradientEngine(parts, options, momentum=train.optimizer.momentum, seed=seed)


def compress(
    module: DistributedDataParallel, options: spec.Compression, *, momentum: float, seed: int
) -> None:
    """Compress the module's gradients as specified by the options, starting with a remainder of
    zero."""
    match options.name:
        case "fp16":
            module.register_comm_hook(None, fp16_compress_hook)
        case "bf16":
            # Use a lambda, because DDP rejects a hook with this name on CPU, although gloo now
            # supports bf16.
            module.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        case "powersgd":
            factors = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=options.rank,
                start_powerSGD_iter=options.start_step,
                warm_start=options.warm_start,
                random_seed=seed % 2**32,
            )
            module.register_comm_hook(factors, powerSGD_hook)
        case "topk":
            # Use a lambda, because DDP rejects functions with postponed annotations.
            state = TopK(options.ratio, momentum, options.warmup_steps)
            module.register_comm_hook(state, lambda rest, bucket: topk_hook(rest, bucket))
        case unknown:
            assert_never(unknown)


class TopK:
    """Keeps the part of each parameter's gradient that has not been sent yet.

    Implements Deep Gradient Compression (arXiv:1712.01887, section 3, without its clipping): the
    velocity u = momentum * u + g is added to the remainder v; the elements with the largest |v| are
    sent, and u and v are set to zero for these elements. During the warm-up, while gradients change
    fast, more elements are sent; the share decreases by a constant factor in each step.
    """

    def __init__(self, ratio: float, momentum: float, warmup_steps: int = 0) -> None:
        self._ratio = ratio
        self._momentum = momentum
        self._warmup_steps = warmup_steps
        self._num_steps = 0
        self._velocities: dict[Tensor, Tensor] = {}
        self._rests: dict[Tensor, Tensor] = {}

    def pick(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return (indices, values) of the elements of the flat gradient that are sent."""
        flat = gradient.reshape(-1)
        if self._momentum:
            velocity = self._kept(self._velocities, parameter, flat)
            velocity.mul_(self._momentum).add_(flat)
            flat = velocity
        rest = self._kept(self._rests, parameter, flat)
        rest += flat
        numbers = rest.abs().topk(self.count(rest.numel()), sorted=False).indices
        values = rest[numbers]
        rest[numbers] = 0.0
        if self._momentum:
            velocity[numbers] = 0.0
        return numbers, values

    def step(self) -> None:
        """Begin the next step."""
        self._num_steps += 1

    def count(self, num_elements: int) -> int:
        ratio = self._ratio
        if self._num_steps < self._warmup_steps:
            done = self._num_steps / self._warmup_steps
            ratio = max(ratio, FIRST_RATIO) ** (1 - done) * ratio**done
        return max(1, int(num_elements * ratio))

    @staticmethod
    def _kept(memory: dict[Tensor, Tensor], parameter: Tensor, like: Tensor) -> Tensor:
        if parameter not in memory:
            memory[parameter] = torch.zeros_like(like)
        return memory[parameter]


def topk_hook(state: TopK, bucket: GradBucket) -> Gradients:
    """Return the mean of the elements that the ranks send, stored in the bucket's own memory."""
    flat: Tensor = bucket.buffer()
    state.step()  # there is one bucket with the whole gradient
    world_size = dist.get_world_size()
    start, numbers, values = 0, [], []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        found, picked = state.pick(parameter, gradient)
        numbers.append(found + start)
        values.append(picked)
        start += gradient.numel()
    # Send indices and values in one message, as 32-bit words.
    sent = torch.cat([torch.cat(numbers).to(torch.int32), torch.cat(values).view(torch.int32)])
    received = sent.new_empty(world_size * sent.numel())
    work: Any = dist.all_gather_into_tensor(received, sent, async_op=True)

    def add_up(gathered: Any) -> Tensor:
        gathered.value()  # raises the error of a failed operation
        flat.zero_()
        for theirs in received.view(world_size, 2, -1):  # in the order of the ranks, on every rank
            flat.index_add_(0, theirs[0].long(), theirs[1].view(flat.dtype), alpha=1 / world_size)
        return flat

    future: Gradients = work.get_future().then(add_up)
    return future
