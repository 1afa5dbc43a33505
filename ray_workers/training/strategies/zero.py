"""Optimizer state spread over the ranks, parameters and gradients whole on each: ZeRO 1.

torch's `ZeroRedundancyOptimizer`: each rank of a group steps some of the parameters, and sends them
to the others. Gradients are those of DDP over the whole world.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():
    # torch compiles its functional optimizers by a way that it has deprecated itself.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

from ray_workers.training import handover
from ray_workers.training.feeding import Feed
from ray_workers.training.strategies.divided import Divided
from ray_workers.training.strategies.replica import Replica
from ray_workers.training.strategies.update import Update, load_named_state, named_state


class ZeroOne(Divided):
    """As `Divided`; ranks of a `shard` group have parts of the optimizer's state alone."""

    _is_torn = False
    """Whether the group broke in the midst of an update, and no twin has given its state since."""

    def _build(self) -> None:
        self.model = self._stage(0, 1)
        page = self.given.page
        self.replica = self._whole_gradient = WholeGradient(
            self.model,
            self.given.workload.loss_sum,
            self.given.autocast,
            lambda: page.is_asked_to_leave,
        )
        self.update = SpreadUpdate(
            self.model, self.replica, self.options, self.device, group=self.mesh.holders
        )
        self._parameters = dict(self.model.named_parameters())

    def _shard(self, model: nn.Module, mesh: Any) -> None:
        """The parameters stay whole."""

    def let_go(self) -> None:
        assert isinstance(self.update, SpreadUpdate)
        self._is_torn |= self.update.is_torn
        super().let_go()

    def align(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        return super().align(handover.TORN if self._is_torn else progress, state)

    def take_over(self, state: Mapping[str, Any]) -> None:
        super().take_over(state)
        self._is_torn = False

    def begin(self, feed: Feed, step: int) -> None:
        super().begin(feed, step)
        if step:
            self.replica.settle_buckets(lambda: feed.at(1).shares)

    @property
    def leaves(self) -> bool:
        return self._whole_gradient.leaves

    def gather(self) -> None:
        assert isinstance(self.update, SpreadUpdate)
        self.update.gather()
        super().gather()

    def _gathered(self, own: dict[str, Any]) -> dict[str, Any] | None:
        return own if self.rank == 0 else None

    def trained(self) -> nn.Module | None:
        return copy.deepcopy(self.model) if self.rank == 0 else None


class WholeGradient(Replica):
    """As `Replica`; somebody's wish to leave is known to all after each step."""

    def __init__(
        self, model: nn.Module, loss_sum: Any, autocast: Any, is_asked: Callable[[], bool]
    ) -> None:
        super().__init__(model, loss_sum, autocast)
        self._is_asked_to_leave = is_asked
        self.leaves = False

    def take_loss(self) -> Tensor:
        loss = super().take_loss()
        asked = torch.tensor(float(self._is_asked_to_leave()), device=loss.device)
        dist.all_reduce(asked)
        self.leaves = bool(asked > 0.0)
        return loss


class SpreadUpdate(Update):
    """As `Update`, of an optimizer of which this rank has a part."""

    def __init__(self, *parts: Any, group: dist.ProcessGroup | None) -> None:
        super().__init__(*parts)
        self._spread = _spread_over(self._optimizer, group)
        self._optimizer = self._spread
        self._is_gathered = False
        self.is_torn = False
        """Whether an update began, and the others' parts of the new weights are not all here."""

    def step(self, lr: float) -> Tensor:
        self.is_torn = True
        norm = super().step(lr)
        self.is_torn = False
        return norm

    def gather(self) -> None:
        """Have rank 0 know all of the state. A collective of each group."""
        self._spread.consolidate_state_dict(to=0)
        self._is_gathered = self._spread.rank == 0 and dist.get_rank() == 0

    def state_dict(self) -> dict[str, Any]:
        """All of it right after `gather` on rank 0, else this rank's part."""
        whole, self._is_gathered = self._is_gathered, False
        optimizer = self._spread if whole else self._spread.optim
        return {"optimizer": named_state(optimizer, self._names)}

    def load_parts(self, optimizer: Mapping[str, Any]) -> None:
        load_named_state(self._spread.optim, self._names, optimizer)

    def _load_optimizer(self, state: Mapping[str, Any], part: Callable[[Any, Tensor], Any]) -> None:
        # Its own way would move `step` to the CPU, where a fused optimizer on a GPU can't use it
        # (pytorch/pytorch#124133).
        load_named_state(self._spread.optim, self._names, state, part)


def _spread_over(
    whole: torch.optim.Optimizer, group: dist.ProcessGroup | None
) -> ZeroRedundancyOptimizer:
    """An optimizer of the same kind, groups and options."""
    kind = type(whole)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in whole.defaults.items() if name in known}
    return ZeroRedundancyOptimizer(whole.param_groups, kind, process_group=group, **options)
