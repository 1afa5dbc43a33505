"""The base class of all gossip modes, which computes the mean of all copies and includes all copies
in its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dray.spec import Gossip
from ray_workers.shared.contracts import CONSENSUS_DISTANCE
from ray_workers.training.core.progress import NOTHING
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.elastic import state_transfer
from ray_workers.training.parallel.data_parallel.ddp import Replicas
from ray_workers.training.parallel.gossip.graphs import without_missing
from ray_workers.training.parallel.gossip.mixing import FlatCopy
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.strategy import StrategyContext


class GossipReplicas(Replicas):
    """A strategy in which each rank has a different copy of the model. Evaluations and the result
    use the mean of the copies, but don't change the copies. A checkpoint contains all copies, and
    their mean as its model."""

    saves_alone = False
    push_weight = 1.0
    """The push weight of this rank's copy (see `Mixing`)."""

    def __init__(
        self, given: StrategyContext, gradients: GradientEngine, update: OptimizerStep
    ) -> None:
        super().__init__(given, gradients, update)
        options = given.spec.sync
        assert isinstance(options, Gossip)
        self._document = options
        self.graph_options = options
        """The graph's options, adapted to the ranks in the group."""
        self._is_new = True
        """Whether this rank joined the group without a copy."""
        buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self._weights, self._buffers = weights_of(self.model), FlatCopy(buffers)
        self._distance = 0.0
        self._consolidated: dict[str, Any] = {}

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        self._is_new = progress == NOTHING
        return super().sync_progress(progress, state)

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        if step == 0:
            self._begin_alike()
        worker_indices = state_transfer.everyones(
            self.given.worker_index, self.device, self.world_size
        )
        num_positions = self.given.spec.resources.num_workers
        self.graph_options = without_missing(self._document, worker_indices, num_positions)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Context manager in which no copy changes, and each rank's model is the same as its copy.
        A collective."""
        yield

    @contextmanager
    def judging(self) -> Iterator[None]:
        with self._as_mean(), super().judging():
            yield

    @contextmanager
    def _as_mean(self) -> Iterator[None]:
        """Context manager in which the model is the mean of all copies. A collective."""
        with self.still():
            weights, buffers = self._weights.read(), self._buffers.read()
            try:
                self._take_mean(weights, buffers)
                yield
            finally:
                self._weights.write(weights)
                self._buffers.write(buffers)

    def trained(self) -> nn.Module | None:
        with self.still():
            self._take_mean(self._weights.read(), self._buffers.read())
        self.push_weight = 1.0
        return super().trained()

    def consolidate(self) -> None:
        mean: dict[str, Any] = {}
        with self.still():
            others = state_transfer.gather(
                lambda: {**self._own_copy(), **self.update.state_dict()}, self.device
            )
            # Compute the mean last, so that no rank finishes before rank 0 has all copies.
            # Otherwise, a rank might treat the checkpoint as complete although another rank has
            # died.
            with self._as_mean():
                if self.rank == 0:
                    mean = _cloned(self.model.state_dict())
        if self.rank == 0:
            # Clone the tensors: only the next optimizer step waits for the checkpoint, but a rank's
            # copy can change before that step.
            own = {**self._own_copy(), "model": _cloned(self.model.state_dict())}
            self._consolidated = {"model": mean, "gossip": {"copies": [own, *others]}}

    def state(self) -> dict[str, Any]:
        """Return the state, including the data that `consolidate` gathered. These data are returned
        only once."""
        found, self._consolidated = self._consolidated, {}
        return super().state() | found

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this rank's copy. If the number of ranks has changed, each rank begins with the
        model that the state contains, which is the mean of all copies, and with the optimizer state
        of one of the ranks."""
        super().load(state)
        copies = state["gossip"]["copies"]
        index = self.rank % len(copies)
        if len(copies) == self.world_size:
            self.model.load_state_dict(copies[index]["model"])
            self.push_weight = copies[index]["push_weight"]
        if index:
            self.update.load_state_dict(copies[index])

    def peer_state_dict(self) -> dict[str, Any]:
        return super().state()

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """If this rank is new, load a peer's copy with a new push weight. Otherwise, keep this
        rank's copy."""
        if self._is_new:
            super().load(state)

    def _own_copy(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "push_weight": self.push_weight}

    @torch.no_grad()
    def _take_mean(self, weights: list[Tensor], buffers: list[Tensor]) -> None:
        """Load the mean of all copies into the model, and measure the distance of the copies from
        the mean. weights, buffers: this rank's copy."""
        if self.world_size == 1:
            return
        total = weights[0].new_tensor([self.push_weight], dtype=torch.float64)
        dist.all_reduce(total)
        share = self.push_weight / total.item()
        means = [row * share for row in (*weights, *buffers)]
        for mean in means:
            dist.all_reduce(mean)
        squares = torch.zeros_like(total)
        for own, mean in zip(weights, means, strict=False):
            squares += torch.linalg.vector_norm(own - mean, dtype=torch.float64) ** 2
        dist.all_reduce(squares)
        self._distance = math.sqrt(squares.item() / self.world_size)
        # Write the mean only after all exchanges. If the group broke after a rank had replaced its
        # copy with the mean, that rank would contribute this mean to the next group's mean.
        self._weights.write(means[: len(weights)])
        self._buffers.write(means[len(weights) :])

    def evaluation_metrics(self) -> dict[str, float]:
        return {CONSENSUS_DISTANCE: self._distance}


def weights_of(model: nn.Module) -> FlatCopy:
    """Return the trainable weights of a model."""
    return FlatCopy([p.detach() for p in model.parameters() if p.requires_grad])


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }
