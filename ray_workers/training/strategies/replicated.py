"""Every rank has the whole model; what they exchange is gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ray_workers.training import handover
from ray_workers.training.blocks import prepare_blocks
from ray_workers.training.data import share
from ray_workers.training.feeding import Feed
from ray_workers.training.initialising import materialise
from ray_workers.training.strategies.base import DataPart, Given, Strategy
from ray_workers.training.strategies.compression import (
    compression_of,
    replica_of,
    takes_momentum,
)
from ray_workers.training.strategies.exact import ExactReplica
from ray_workers.training.strategies.replica import Replica
from ray_workers.training.strategies.update import Update


class Replicated(Strategy):
    """Data parallelism: by DDP, by DDP with compressed gradients, or exact at any world size.

    All ranks are equal, so any of them can hand its state to a newcomer.
    """

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        spec = given.spec
        self.model = given.workload.model
        materialise(self.model, given.device, spec.train.seed)
        prepare_blocks(self.model, spec.train)
        self.num_shares = spec.resources.num_workers if spec.is_exact else None
        """Of each global batch, at any world size; None for one of each rank."""
        self.replica = self._replica()
        self.update = Update(
            *(self.model, self.replica, spec.train, given.device),
            has_momentum=not takes_momentum(compression_of(spec)),
        )

    def _replica(self) -> Replica:
        if self.num_shares is None:
            return replica_of(self.given, self.model)
        parts = (self.model, self.given.workload.loss_sum, self.given.autocast)
        return ExactReplica(*parts, self.num_shares)

    def data_part(self) -> DataPart:
        num_shares = self.num_shares or self.world_size
        return DataPart(range(*share(num_shares, self.rank, self.world_size)), num_shares)

    def align(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        newest, source, all_have_it = handover.newest(progress, self.device, self.world_size)
        handed = None
        if newest != handover.NOTHING and not all_have_it:
            handed = handover.broadcast(state, source, self.rank, self.device)
        return newest, handed if progress < newest else None

    def begin(self, feed: Feed, step: int) -> None:
        self.replica.form(self.world_size)
        if step:
            self.replica.settle_buckets(lambda: feed.at(1).shares)

    def let_go(self) -> None:
        self.replica.disband()

    @property
    def leaves(self) -> bool:
        return self.given.page.is_asked_to_leave

    def predict(self, inputs: Tensor) -> Tensor | None:
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), **self.update.state_dict()}

    def handed_over(self) -> dict[str, Any]:
        return self.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)

    def take_over(self, state: Mapping[str, Any]) -> None:
        self.load(state)

    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(whole)
        self.update.start_average()

    def trained(self) -> nn.Module | None:
        return self.update.weights
