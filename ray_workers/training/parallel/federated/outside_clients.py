"""The strategy of a federated job whose clients are outside of the cluster: its only rank is the
server, and a round is a step as in a simulation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.data_parallel.ddp import Ddp
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.collecting import (
    CollectedShare,
    DamagedUpdateError,
    UpdateCollector,
)
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.federated.federated import ServerState
from ray_workers.training.parallel.federated.received import ReceivedUpdates
from ray_workers.training.parallel.federated.rounds import Participant
from ray_workers.training.parallel.federated.server_optimizers import ServerStep
from ray_workers.training.parallel.strategy import StrategyContext


class OutsideEngine(FederatedEngine):
    """Adds up the updates that clients have sent."""

    @property
    def num_update_elements(self) -> int:
        return self._flat.num_elements

    def _update_of(self, participant: Participant, mine: RoundShare) -> tuple[Tensor, float]:
        assert isinstance(mine, CollectedShare)
        self._given.page.move()
        sent, size = mine.sent[participant.client], self._flat.num_elements
        try:
            update = mine.update_of(participant.client, size)
        except DamagedUpdateError:  # changed since it came in: what is not finite is refused
            update = torch.full((size,), math.nan)
        return update.to(self._given.device), sent.loss

    def _metrics(
        self, mine: RoundShare, received: ReceivedUpdates, *, counts: bool
    ) -> dict[str, float]:
        assert isinstance(mine, CollectedShare)
        found = super()._metrics(mine, received, counts=counts)
        losses = [
            (one.val_loss, one.num_val_samples)
            for one in (mine.sent[mine.plan.participants[at].client] for at in received.accepted)
            if one.val_loss is not None
        ]
        if losses:
            total = sum(loss * count for loss, count in losses)
            found["federated/val_loss"] = total / sum(count for _, count in losses)
            worst = sorted((loss for loss, _ in losses), reverse=True)
            worst = worst[: math.ceil(len(worst) / 10)]
            found["federated/worst_tenth_val_loss"] = sum(worst) / len(worst)
        return found


class OutsideStrategy(Ddp):
    """The server of clients that are outside of the cluster, on the job's only rank."""

    def __init__(self, given: StrategyContext) -> None:
        options = given.spec.federated
        assert options is not None
        self._engine = OutsideEngine(given)
        update = ServerStep(given, self._engine, options)
        super().__init__(given, self._engine, update, ServerState(given, self._engine))

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        return UpdateCollector(self.given, self._engine.num_update_elements, self._tensors)

    def _tensors(self) -> dict[str, Tensor]:
        """Copies, since a file's tensors must not share memory, and tied weights do."""
        state = self.model.state_dict()
        return {name: one.detach().cpu().clone().contiguous() for name, one in state.items()}
