"""ZeRO 1: the optimizer's state is divided among the ranks; each rank has all parameters and
gradients.

The implementation uses torch's `ZeroRedundancyOptimizer`: each rank of a group updates some of the
parameters and sends them to the other ranks. DDP averages the gradients over all ranks.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():
    # torch uses one of its own deprecated APIs to compile its functional optimizers.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.data_parallel.compression import (
    compressed_or_plain,
    takes_momentum,
)
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.model_parallel.device_mesh import Context, Mesh
from ray_workers.training.parallel.model_parallel.model_parallel import ModelParallel
from ray_workers.training.parallel.optim.optimizer_step import (
    OptimizerStep,
    load_named_state,
    named_state,
    parameters_of,
)


class Zero1Step(OptimizerStep):
    """The step of an optimizer whose state is divided among ranks. After each step, every rank
    knows whether any rank has been asked to leave."""

    def __init__(
        self,
        *parts: Any,
        has_momentum: bool,
        group: dist.ProcessGroup | None,
        is_asked_to_leave: Callable[[], bool],
    ) -> None:
        super().__init__(*parts, has_momentum=has_momentum)
        self._spread = _spread_over(self._optimizer, group)
        self._optimizer = self._spread
        self._is_asked_to_leave = is_asked_to_leave
        self.preemption_requested = False
        self.is_torn = False
        """Whether an update has begun, but not all ranks' parts of the new weights have arrived."""

    def step(self, lr: float) -> Tensor:
        asked = torch.full_like(self._one, float(self._is_asked_to_leave()))
        dist.all_reduce(asked)
        is_requested = bool(asked > 0.0)
        process_group.wait_for_results(self._one.device)
        self.preemption_requested = is_requested
        self.is_torn = True
        norm = super().step(lr)
        process_group.wait_for_results(self._one.device)
        self.is_torn = False
        return norm

    def _optimizer_state(self) -> dict[str, Any]:
        """Return this rank's part of the state."""
        return named_state(self.local_optimizer, self._names)

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        own: torch.optim.Optimizer = self._spread.optim
        return own

    def _load_optimizer(self, state: Mapping[str, Any], part: Callable[[Any, Tensor], Any]) -> None:
        # `ZeroRedundancyOptimizer.load_state_dict` would move `step` to the CPU, where a fused
        # optimizer for a GPU can't use it (pytorch/pytorch#124133).
        load_named_state(self.local_optimizer, self._names, state, part)


class Zero1(ModelParallel):
    """The ranks of a `shard` group divide only the optimizer's state among themselves. `update`
    shows whether a rank has been asked to leave."""

    is_whole = True
    update: Zero1Step

    def divide(
        self, mesh: Mesh, context: Context | None
    ) -> tuple[nn.Module, GradientEngine, Zero1Step]:
        given = self.given
        model = copy.deepcopy(given.workload.model)
        gradients = compressed_or_plain(given, given.engine_parts(model))
        update = Zero1Step(
            *(model, gradients, given.spec.train, given.device),
            has_momentum=not takes_momentum(given.spec.compression),
            group=mesh.holders,
            is_asked_to_leave=lambda: given.page.is_asked_to_leave,
        )
        return model, gradients, update

    @property
    def preemption_requested(self) -> bool:
        return self.update.preemption_requested

    def updated_parameters(self) -> Iterable[Tensor]:
        return parameters_of(self.update.local_optimizer)

    def leave_group(self) -> None:
        if self._is_built:
            self._is_torn |= self.update.is_torn
        super().leave_group()


def _spread_over(
    whole: torch.optim.Optimizer, group: dist.ProcessGroup | None
) -> ZeroRedundancyOptimizer:
    """Create a sharded optimizer of the same kind, with the same groups and options."""
    kind = type(whole)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in whole.defaults.items() if name in known}
    return ZeroRedundancyOptimizer(whole.param_groups, kind, process_group=group, **options)
