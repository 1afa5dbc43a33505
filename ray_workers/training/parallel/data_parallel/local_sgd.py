"""Local steps of each rank, with periodic synchronization of the ranks.

Local SGD (arXiv:1805.09767) averages the ranks' weights. DiLoCo (arXiv:2311.08105) passes the mean
of the ranks' changes as a gradient to an outer optimizer. Between synchronizations, each rank has
its own weights, and the state of its inner optimizer is never synchronized. Therefore the ranks
synchronize directly before each checkpoint and evaluation, and a checkpoint contains every rank's
inner state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dray.spec import AllReduce
from ray_workers.shared.contracts import CONSENSUS_DISTANCE
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.elastic import process_group, state_transfer
from ray_workers.training.parallel.data_parallel.ddp import Replicas
from ray_workers.training.parallel.gradients import GradientEngine, Pass
from ray_workers.training.parallel.strategy import StrategyContext


class LocalGradientEngine(GradientEngine):
    """Computes the gradient of this rank's own share, without exchanging it.

    The gradient is weighted by the number of samples in the share, so that the mean over the ranks
    is the gradient of the global batch, as with all-reduce. If all shares are equal, the gradient
    is the mean over the share; otherwise, this mean is multiplied by the ratio of the share's size
    to the size of an equal share.
    """

    uses_ddp = False
    _scale: Tensor | None = None
    _part = 1.0
    """Ratio of the share's size to the size of an equal share."""
    _last_loss: Tensor | None = None

    def backward(self, work: Pass) -> None:
        """Compute the gradient of this rank's share only. `before_exchange` is not called."""
        mine = work.share
        work.prepare(mine.batch.number)
        self.has_samples, self._scale = not mine.batch.is_empty, work.scale
        self._part = self._world_size * len(mine.batch.indices) * mine.batch.weight
        self._exchange(mine, mine.batch.weight, work.scale, lambda: None)

    def take_loss(self) -> Tensor:
        """Return the mean loss of the share or, if it has no samples, of the rank's last share with
        samples."""
        carried = super().take_loss()
        scale = carried.new_ones(()) if self._scale is None else self._scale
        if self.has_samples:
            self._last_loss = carried / (scale * self._part)
        return carried if self._last_loss is None else self._last_loss * scale


class LocalSgd(Replicas):
    """The ranks periodically synchronize their weights. A checkpoint contains all inner states."""

    saves_alone = False

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given, LocalGradientEngine(given.engine_parts()))
        options, model = given.spec.sync, self.model
        assert isinstance(options, AllReduce)
        self._every = options.every
        self._weights = [p.detach() for p in model.parameters() if p.requires_grad]
        self._means = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.agreed = [weight.clone() for weight in self._weights]
        """The weights after the last synchronization."""
        self._outer: torch.optim.SGD | None = None
        if options.outer is not None:
            lr, momentum = options.outer.lr, options.outer.momentum
            self._outer = torch.optim.SGD(
                self.agreed, lr=lr, momentum=momentum, nesterov=momentum > 0.0
            )
        self._others: list[dict[str, Any]] = []
        self._distance: float | None = None
        self._is_asked_to_leave = False

    @property
    def preemption_requested(self) -> bool:
        """Whether any rank had been asked to leave at the time of the last synchronization."""
        return self._is_asked_to_leave

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        self._begin_alike()
        torch._foreach_copy_(self.agreed, self._weights)

    def after_step(self, step: int) -> None:
        calendar = self.given.calendar
        is_due = calendar.evaluates_after(step) or calendar.saves_after(step)
        if is_due or step % self._every == 0:
            self.given.page.exchange()
            self._agree(measures=calendar.evaluates_after(step))

    @torch.no_grad()
    def _agree(self, *, measures: bool) -> None:
        """Synchronize the weights, and determine whether any rank has been asked to leave.
        measures: whether to also measure the distance between the ranks' weights."""
        asked = self._weights[0].new_tensor([float(self.given.page.is_asked_to_leave)])
        *means, asked = _means([*self._weights, *self._means, asked], self.world_size)
        self._is_asked_to_leave = bool(asked > 0.0)
        if measures and self.world_size > 1:
            square = sum(
                torch.linalg.vector_norm(own - mean, dtype=torch.float64) ** 2
                for own, mean in zip(self._weights, means, strict=False)
            )
            assert isinstance(square, Tensor)
            process_group.add_up(square, self.world_size)
            self._distance = math.sqrt(square.item() / self.world_size)
        for buffer, mean in zip(self._means, means[len(self._weights) :], strict=True):
            buffer.copy_(mean)
        if self._outer is None:
            torch._foreach_copy_(self.agreed, means[: len(self._weights)])
        else:
            for agreed, mean in zip(self.agreed, means, strict=False):
                agreed.grad = agreed - mean
            self._outer.step()
            self._outer.zero_grad()
        torch._foreach_copy_(self._weights, self.agreed)

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the distance between the ranks' weights, measured just before the weights were
        averaged for the evaluation."""
        return {} if self._distance is None else {CONSENSUS_DISTANCE: self._distance}

    def consolidate(self) -> None:
        self._others = state_transfer.gather(self.update.state_dict, self.device)

    def state(self) -> dict[str, Any]:
        """Return the state, including the inner states that `consolidate` gathered, and release the
        gathered states."""
        inner, self._others = self._others, []
        outer = {} if self._outer is None else self._outer.state_dict()
        return {**super().state(), "local": {"outer": outer, "inner": inner}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. The inner state is the state of this rank or, if the checkpoint does not
        contain this state, the state of another rank."""
        super().load(state)
        local = state["local"]
        if self._outer is not None and local["outer"]:
            self._outer.load_state_dict(local["outer"])
        inner = local["inner"]
        index = self.rank % (len(inner) + 1)
        if index:
            self.update.load_state_dict(inner[index - 1])


def _means(tensors: Sequence[Tensor], world_size: int) -> list[Tensor]:
    """Return the mean of each tensor over the ranks. All tensors of the same dtype are sent
    together."""
    if world_size == 1:
        return list(tensors)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[at].reshape(-1) for at in indices])
        dist.all_reduce(flat)
        flat /= world_size
        parts = torch.split(flat, [tensors[at].numel() for at in indices])
        found |= {at: part.view(tensors[at].shape) for at, part in zip(indices, parts, strict=True)}
    return [found[at] for at in range(len(tensors))]
