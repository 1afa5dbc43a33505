"""Every rank has the whole model; what they exchange is gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ray_workers.training.core.progress import NOTHING
from ray_workers.training.data.prefetcher import Prefetcher
from ray_workers.training.data.sampler import share
from ray_workers.training.elastic import state_transfer
from ray_workers.training.parallel.activation_checkpointing import prepare_blocks
from ray_workers.training.parallel.data_parallel.compression import (
    compression_of,
    replica_of,
    takes_momentum,
)
from ray_workers.training.parallel.data_parallel.deterministic_ddp import (
    DeterministicGradientEngine,
)
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.strategy import DataPart, Strategy, StrategyContext


class Ddp(Strategy):
    """Data parallelism: by DDP, by DDP with compressed gradients, or exact at any world size.

    All ranks are equal, so any of them can hand its state to a newcomer.
    """

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given)
        spec = given.spec
        self.model = given.workload.model
        materialise(self.model, given.device, spec.train.seed)
        prepare_blocks(self.model, spec.train)
        self.num_shares = spec.resources.num_workers if spec.is_exact else None
        """Of each global batch, at any world size; None for one of each rank."""
        self.gradients = self._replica()
        self.update = OptimizerStep(
            *(self.model, self.gradients, spec.train, given.device),
            has_momentum=not takes_momentum(compression_of(spec)),
        )

    def _replica(self) -> GradientEngine:
        if self.num_shares is None:
            return replica_of(self.given, self.model)
        parts = (self.model, self.given.workload.loss_sum, self.given.autocast)
        return DeterministicGradientEngine(*parts, self.num_shares)

    def data_part(self) -> DataPart:
        num_shares = self.num_shares or self.world_size
        return DataPart(range(*share(num_shares, self.rank, self.world_size)), num_shares)

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        newest, source, all_have_it = state_transfer.newest(progress, self.device, self.world_size)
        handed = None
        if newest != NOTHING and not all_have_it:
            handed = state_transfer.broadcast(state, source, self.rank, self.device)
        return newest, handed if progress < newest else None

    def prepare(self, feed: Prefetcher, step: int) -> None:
        self.gradients.form(self.world_size)
        if step:
            self.gradients.settle_buckets(lambda: feed.at(1).shares)

    def leave_group(self) -> None:
        self.gradients.disband()

    @property
    def preemption_requested(self) -> bool:
        return self.given.page.is_asked_to_leave

    def predict(self, inputs: Tensor) -> Tensor | None:
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), **self.update.state_dict()}

    def peer_state_dict(self) -> dict[str, Any]:
        return self.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        self.load(state)

    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(whole)
        self.update.start_average()

    def trained(self) -> nn.Module | None:
        return self.update.weights
