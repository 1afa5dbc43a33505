"""Data parallelism: every rank has the whole model.

The strategy is put together here from its parts: the engine that computes and averages gradients
(`ray_workers.training.parallel.gradients`), and what the ranks synchronise besides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dray.train.prepared.copies import digest, tensors_in
from ray_workers.training.core.errors import CopiesDifferError
from ray_workers.training.core.progress import NOTHING
from ray_workers.training.core.workload import LossSum
from ray_workers.training.data.prefetcher import Feed, Share
from ray_workers.training.data.sampler import share
from ray_workers.training.elastic import process_group, state_transfer
from ray_workers.training.parallel.activation_checkpointing import prepare_blocks
from ray_workers.training.parallel.data_parallel.compression import (
    compressed_or_plain,
    takes_momentum,
)
from ray_workers.training.parallel.data_parallel.deterministic_ddp import (
    DeterministicGradientEngine,
)
from ray_workers.training.parallel.data_parallel.gradient_noise import (
    NoiseMeasuringGradientEngine,
)
from ray_workers.training.parallel.gradients import Autocast, GradientEngine
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.strategy import DataPart, Strategy, StrategyContext


class ReplicaSync:
    """The part of a strategy that replicas do together besides exchanging gradients: here nothing.

    `prepare`, `after_step` and `consolidate` are collectives.
    """

    saves_alone = True
    """Rank 0 has all of a checkpoint without asking the others."""
    keeps_copies = False
    """Each rank has a copy of the model of its own, which a rank of a broken group keeps."""
    is_on_demand = False
    """Which shares a rank computes is found out during the step."""

    def __init__(self, given: StrategyContext) -> None:
        self.given = given
        self.rank, self.world_size = 0, 1

    @property
    def preemption_requested(self) -> bool:
        return self.given.page.is_asked_to_leave

    def prepare(self, feed: Feed, step: int) -> None:
        """Be ready for the step after `step`; all ranks have the same weights."""

    def turns(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        """The shares of each optimizer step of this rank in a step of the calendar."""
        yield shares

    def after_step(self, step: int) -> None:
        """Do what is due after the optimizer's step."""

    def leave_group(self) -> None:
        """Take part in a broken group no more."""

    def consolidate(self) -> None:
        """Have rank 0 know the state of all, for `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint that neither the model nor the optimizer has."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this part of a whole checkpoint."""

    def peer_state_dict(self) -> dict[str, Any]:
        """The same part for a rank that joins the group."""
        return self.state_dict()

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Take the result of a peer's `peer_state_dict`."""
        self.load_state_dict(state)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Within it the model is the one that is evaluated. A collective."""
        yield

    def settle(self) -> None:
        """Have the model be the one that is the result. A collective."""

    def evaluation_metrics(self) -> dict[str, float]:
        """Further metrics of the last evaluation."""
        return {}


class Ddp(Strategy):
    """Data parallelism. All ranks are equal, so any of them can hand its state to a newcomer."""

    update: OptimizerStep

    def __init__(
        self,
        given: StrategyContext,
        gradients: GradientEngine,
        update: OptimizerStep,
        sync: ReplicaSync,
        num_shares: int | None = None,
    ) -> None:
        """num_shares: of each global batch, at any world size; None for one of each rank."""
        super().__init__(given)
        self.model = given.workload.model
        self.gradients = gradients
        self.update = update
        self.sync = sync
        self._num_shares = num_shares
        self._is_new = True
        """The rank came into the group without a state."""

    def join_group(self, rank: int, world_size: int) -> None:
        super().join_group(rank, world_size)
        self.sync.rank, self.sync.world_size = rank, world_size

    def data_part(self) -> DataPart:
        num_shares = self._num_shares or self.world_size
        own = range(*share(num_shares, self.rank, self.world_size))
        return DataPart(own, num_shares, is_on_demand=self.sync.is_on_demand)

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        newest, source, all_have_it = state_transfer.newest(progress, self.device, self.world_size)
        handed = None
        self._is_new = progress == NOTHING
        if newest != NOTHING and not all_have_it:
            handed = state_transfer.broadcast(state, source, self.rank, self.device)
        return newest, handed if progress < newest else None

    def compare_copies(self) -> None:
        if self.world_size == 1 or self.given.spec.copies_differ:
            return
        # Buffers are those of rank 0 from the next forward pass on.
        alike = self.update.replicated(self.update.state_dict())
        mine = digest([*self.model.parameters(), *tensors_in(alike)]) % 2**62
        if not process_group.all_same(mine, self.device, self.world_size):
            raise CopiesDifferError

    def prepare(self, feed: Feed, step: int) -> None:
        self.gradients.form(self.world_size)
        if step:
            self.gradients.settle_buckets(lambda: feed.at(1).shares)
        self.sync.prepare(feed, step)

    def turns(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        return self.sync.turns(step, shares)

    def after_step(self, step: int) -> None:
        self.sync.after_step(step)

    def leave_group(self) -> None:
        self.sync.leave_group()
        self.gradients.disband()

    @property
    def preemption_requested(self) -> bool:
        return self.sync.preemption_requested

    def predict(self, inputs: Tensor) -> Tensor | None:
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    @contextmanager
    def judging(self) -> Iterator[None]:
        with self.sync.judged(), super().judging():
            yield

    def evaluation_metrics(self) -> dict[str, float]:
        return self.sync.evaluation_metrics()

    def consolidate(self) -> None:
        self.sync.consolidate()

    def state(self) -> dict[str, Any]:
        return self._own_state() | self.sync.state_dict()

    def peer_state_dict(self) -> dict[str, Any]:
        return self._own_state() | self.sync.peer_state_dict()

    def _own_state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), **self.update.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._load_own(state)
        self.sync.load_state_dict(state)

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        if self._is_new or not self.sync.keeps_copies:
            self._load_own(state)
            self.sync.load_peer_state(state)

    def _load_own(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)

    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(whole)
        self.update.start_average()

    def trained(self) -> nn.Module | None:
        self.sync.settle()
        return self.update.weights

    @property
    def saves_alone(self) -> bool:
        return self.sync.saves_alone


def plain_ddp(given: StrategyContext) -> Ddp:
    """By torch's DDP, with compressed gradients where the document asks for them, or with a measure
    of their noise."""
    gradients: GradientEngine
    if given.spec.train.measure_noise:
        gradients = NoiseMeasuringGradientEngine(*engine_parts(given))
    else:
        gradients = compressed_or_plain(given, prepared_model(given))
    return Ddp(given, gradients, optimizer_step_of(given, gradients), ReplicaSync(given))


def deterministic_ddp(given: StrategyContext) -> Ddp:
    """With results that are the same at any world size."""
    num_shares = given.spec.resources.num_workers
    gradients = DeterministicGradientEngine(*engine_parts(given), num_shares)
    update = optimizer_step_of(given, gradients)
    return Ddp(given, gradients, update, ReplicaSync(given), num_shares)


def prepared_model(given: StrategyContext) -> nn.Module:
    """The workload's model with its first numbers, on the device."""
    model, options = given.workload.model, given.spec.train
    materialise(model, given.device, options.seed)
    prepare_blocks(model, options)
    return model


def engine_parts(given: StrategyContext) -> tuple[nn.Module, LossSum, Autocast]:
    """The arguments of a `GradientEngine` of the workload's model."""
    return prepared_model(given), given.workload.loss_sum, given.autocast


def optimizer_step_of(given: StrategyContext, gradients: GradientEngine) -> OptimizerStep:
    return OptimizerStep(
        *(given.workload.model, gradients, given.spec.train, given.device),
        has_momentum=not takes_momentum(given.spec.compression),
    )
