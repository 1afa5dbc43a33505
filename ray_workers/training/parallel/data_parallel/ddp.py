"""Data parallelism: every rank has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dray.train.prepared.copies import tensors_in
from ray_workers.training.core.progress import NOTHING
from ray_workers.training.data.sampler import share
from ray_workers.training.elastic import process_group, state_transfer
from ray_workers.training.parallel.data_parallel.compression import (
    compressed_or_plain,
    takes_momentum,
)
from ray_workers.training.parallel.data_parallel.gradient_noise import (
    NoiseMeasuringGradientEngine,
)
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.replicas import Replicated
from ray_workers.training.parallel.strategy import DataPart, Strategy, StrategyContext


class Replicas(Strategy):
    """Every rank has the whole model. All ranks are equivalent, so any of them can send its state
    to a new rank."""

    is_on_demand = False
    """Whether the shares of a batch are assigned to ranks during the step, instead of before it."""
    num_shares: int | None = None
    """Number of shares of each global batch, regardless of the world size; None for one share per
    rank."""
    update: OptimizerStep

    def __init__(
        self,
        given: StrategyContext,
        gradients: GradientEngine,
        update: OptimizerStep | None = None,
    ) -> None:
        """update: the optimizer step; by default, the step of the document's optimizer."""
        super().__init__(given)
        self.model = given.workload.model
        self.gradients = gradients
        self.update = update or OptimizerStep(
            *(self.model, gradients, self.options, self.device),
            has_momentum=not takes_momentum(given.spec.compression),
        )

    def data_part(self) -> DataPart:
        num_shares = self.num_shares or self.world_size
        own = range(*share(num_shares, self.rank, self.world_size))
        return DataPart(own, num_shares, is_on_demand=self.is_on_demand)

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        newest, source, all_have_it = state_transfer.newest(progress, self.device, self.world_size)
        handed = None
        if newest != NOTHING and not all_have_it:
            handed = state_transfer.broadcast(state, source, self.rank, self.device)
        return newest, handed if progress < newest else None

    def _begin_alike(self) -> None:
        """Load rank 0's model, because different machines might draw different random numbers. A
        collective."""
        if self.world_size > 1:
            process_group.have_rank_0s([*self.model.parameters(), *self.model.buffers()])

    def replicated(self) -> Sequence[Replicated]:
        if self.world_size == 1 or self.given.spec.copies_differ:
            return ()
        # Buffers are not compared, because the next forward pass replaces them with rank 0's
        # buffers.
        alike = self.update.replicated(self.update.state_dict())
        return [Replicated([*self.model.parameters(), *tensors_in(alike)], lambda _: 0)]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), **self.update.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)

    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(whole)
        self.update.start_average()


class Ddp(Replicas):
    """Torch's DDP, with compression or noise measurement of the gradients if the document sets
    it."""

    def __init__(self, given: StrategyContext) -> None:
        parts = given.engine_parts()
        measures = given.spec.train.measure_noise
        super().__init__(
            given,
            NoiseMeasuringGradientEngine(parts) if measures else compressed_or_plain(given, parts),
        )
