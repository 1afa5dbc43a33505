"""Steps that each rank takes by itself, and what the ranks agree on after some of them.

Local SGD (arXiv:1805.09767) takes the mean of the ranks' weights. DiLoCo (arXiv:2311.08105) takes
the mean of how far they have come for a gradient, and gives that to an outer optimizer. In between
each rank has weights of its own, and its own state of the inner optimizer for good; so checkpoints
and evaluations come right after an agreement, and a checkpoint holds every rank's inner state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dray import spec
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.data.prefetcher import Prefetcher, Share
from ray_workers.training.elastic import process_group, state_transfer
from ray_workers.training.parallel.data_parallel.ddp import Ddp
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.strategy import StrategyContext


class LocalGradientEngine(GradientEngine):
    """Computes the mean gradient over this rank's own share, of which nobody else learns."""

    def form(self, world_size: int) -> None:
        self._world_size = world_size
        if world_size > 1:  # unlike machines may draw unlike weights
            process_group.have_rank_0s([*self._parameters, *self._buffers])

    def backward(
        self,
        shares: Sequence[Share],
        scale: Tensor | None,
        prepare: Callable[[int], None],
        before_exchange: Callable[[], None],
    ) -> None:
        """As `Replica`'s, but of this rank's share alone; `before_exchange` is not called."""
        (mine,) = shares
        prepare(mine.batch.number)
        weight = 0.0 if mine.batch.is_empty else 1 / len(mine.batch.indices)
        self._exchange(mine, weight / self._world_size, scale, lambda: None)


class Agreement:
    """When the ranks agree, how, and what a checkpoint holds besides."""

    def __init__(
        self, model: nn.Module, update: OptimizerStep, options: spec.Sync, calendar: Calendar
    ) -> None:
        self._update = update
        self._every = options.every
        self._calendar = calendar
        self._weights = [p.detach() for p in model.parameters() if p.requires_grad]
        self._means = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.agreed = [weight.clone() for weight in self._weights]
        self._outer: torch.optim.SGD | None = None
        if options.outer is not None:
            lr, momentum = options.outer.lr, options.outer.momentum
            self._outer = torch.optim.SGD(
                self.agreed, lr=lr, momentum=momentum, nesterov=momentum > 0.0
            )
        self._others: list[dict[str, Any]] = []
        self.preemption_requested = False
        """Whether somebody had been asked to leave when the ranks last agreed."""

    def begin(self) -> None:
        """Go on from the weights that the model has now, on every rank."""
        torch._foreach_copy_(self.agreed, self._weights)

    def is_due_after(self, step: int) -> bool:
        """Whether the ranks agree after this step."""
        calendar = self._calendar
        is_due = calendar.evaluates_after(step) or calendar.saves_after(step)
        return is_due or step % self._every == 0

    @torch.no_grad()
    def reach(self, world_size: int, *, leaves: bool) -> None:
        """Have the same weights on every rank. A collective.

        leaves: whether this rank was asked to leave; all learn whether any was.
        """
        asked = self._weights[0].new_tensor([float(leaves)])
        *means, asked = _means([*self._weights, *self._means, asked], world_size)
        self.preemption_requested = bool(asked > 0.0)
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

    def consolidate(self, device: torch.device) -> None:
        """Have rank 0 know the inner states of all, for a checkpoint. A collective."""
        self._others = state_transfer.gather(self._update.state_dict, device)

    def state_dict(self) -> dict[str, Any]:
        """On rank 0; with what `consolidate` found, once."""
        inner, self._others = self._others, []
        outer = {} if self._outer is None else self._outer.state_dict()
        return {"outer": outer, "inner": inner}

    def load_state_dict(self, state: Mapping[str, Any], rank: int) -> None:
        """Take the inner state that this rank had; one that was not there takes another's."""
        if self._outer is not None and state["outer"]:
            self._outer.load_state_dict(state["outer"])
        inner = state["inner"]
        place = rank % (len(inner) + 1)
        if place:
            self._update.load_state_dict(inner[place - 1])


class LocalSgd(Ddp):
    """As `Replicated`, with gradients that are each rank's own."""

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given)
        assert given.spec.sync is not None
        self._agreement = Agreement(self.model, self.update, given.spec.sync, given.calendar)

    def _replica(self) -> GradientEngine:
        return LocalGradientEngine(self.model, self.given.workload.loss_sum, self.given.autocast)

    def prepare(self, feed: Prefetcher, step: int) -> None:
        super().prepare(feed, step)
        self._agreement.begin()

    def after_step(self, step: int) -> None:
        if self._agreement.is_due_after(step):
            page = self.given.page
            page.exchange()
            self._agreement.reach(self.world_size, leaves=page.is_asked_to_leave)

    @property
    def agreed(self) -> Sequence[Tensor]:
        """The weights that the ranks last agreed on."""
        return self._agreement.agreed

    @property
    def preemption_requested(self) -> bool:
        return self._agreement.preemption_requested

    def consolidate(self) -> None:
        self._agreement.consolidate(self.device)

    def state(self) -> dict[str, Any]:
        return super().state() | {"local": self._agreement.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._agreement.load_state_dict(state["local"], self.rank)

    @property
    def saves_alone(self) -> bool:
        return False


def _means(tensors: Sequence[Tensor], world_size: int) -> list[Tensor]:
    """The mean over the ranks of each tensor; all of one dtype travel together."""
    if world_size == 1:
        return list(tensors)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[at].reshape(-1) for at in places])
        dist.all_reduce(flat)
        flat /= world_size
        parts = torch.split(flat, [tensors[at].numel() for at in places])
        found |= {at: part.view(tensors[at].shape) for at, part in zip(places, parts, strict=True)}
    return [found[at] for at in range(len(tensors))]
