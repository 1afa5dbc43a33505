"""The strategy of a federated job with clients outside the cluster. The only rank is the server,
and each round is one step, as in a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dray.train import files
from ray_workers.shared.job_log import log
from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.federated.aggregation.received import ReceivedUpdates
from ray_workers.training.parallel.federated.aggregation.update_checks import (
    Reported,
    Verdict,
    mean,
    trusted,
)
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.federated.masking_values import needing_cryptography
from ray_workers.training.parallel.federated.outside.sent_updates import DamagedUpdateError
from ray_workers.training.parallel.federated.outside.update_collector import (
    CollectedShare,
    MaskedShare,
    UpdateCollector,
)
from ray_workers.training.parallel.federated.rounds import Participant
from ray_workers.training.parallel.federated.server import ServerStrategy
from ray_workers.training.parallel.gradients import Pass
from ray_workers.training.parallel.strategy import StrategyContext


class OutsideEngine(FederatedEngine):
    """Sums the updates that clients have sent."""

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given)
        self.liars: set[int] = set()
        """Clients that are excluded because they have lied in secure aggregation."""

    def state_dict(self) -> dict[str, Any]:
        # Record which job the clients belong to, because another job that continues from this state
        # assigns the same numbers to different clients.
        liars = {"rounds": self._given.rounds_url, "clients": sorted(self.liars)}
        return super().state_dict() | {"liars": liars}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        liars = state.get("liars", {})  # absent in checkpoints of older versions
        if liars.get("rounds") == self._given.rounds_url:
            self.liars.update(liars["clients"])

    def _update_of(self, participant: Participant, mine: RoundShare) -> tuple[Tensor, float]:
        assert isinstance(mine, CollectedShare)
        self._given.page.move()
        sent, size = mine.sent[participant.client], self._flat.num_elements
        try:
            update = mine.update_of(participant.client, size)
        # Replace the damaged update with NaN values, so that the round rejects the update.
        except DamagedUpdateError:
            update = torch.full((size,), math.nan)
        return update.to(self._given.device), sent.loss

    def backward(self, work: Pass) -> None:
        mine = work.share
        if not isinstance(mine, MaskedShare):
            super().backward(work)
            return
        count = len(mine.plan.participants)
        hidden = [math.nan] * count
        received = ReceivedUpdates(mine.plan, [Verdict.ACCEPTED] * count, hidden, hidden)
        self._take(mine, received, self._of_sum(received, mine.total))

    def _metrics(
        self, mine: RoundShare, received: ReceivedUpdates, *, counts: bool
    ) -> dict[str, float]:
        found = super()._metrics(mine, received, counts=counts)
        if not isinstance(mine, CollectedShare):
            return found
        http = self._options.http
        assert http is not None
        sent = [mine.sent[mine.plan.participants[at].client] for at in received.accepted]
        losses = trusted(
            Reported(one.val_loss, min(one.num_val_samples, http.max_samples))
            for one in sent
            if one.val_loss is not None
        )
        if (val_loss := mean(losses)) is not None:
            found["federated/val_loss"] = val_loss
            worst = sorted((one.value for one in losses), reverse=True)
            worst = worst[: math.ceil(len(worst) / 10)]
            found["federated/worst_tenth_val_loss"] = sum(worst) / len(worst)
        return found


class OutsideStrategy(ServerStrategy):
    """The server for clients outside the cluster, on the job's only rank."""

    _engine: OutsideEngine

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given, OutsideEngine(given))
        self._collector: Callable[..., UpdateCollector] = UpdateCollector
        if self._options.secure_aggregation is not None:
            with needing_cryptography():
                from ray_workers.training.parallel.federated.outside import masked_collector

            masked_collector.refuse_too_few_bits(self._options, self._engine.num_update_elements)
            liars = self._engine.liars
            self._collector = partial(masked_collector.MaskedCollector, liars=liars)

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        return self._collector(self.given, self._engine.num_update_elements, self._tensors)

    def trained(self) -> nn.Module | None:
        """Return the model, and delete the files of the last rounds, whose results are in a
        checkpoint."""
        try:
            files.remove_folder(self.given.rounds_url)
        except Exception as error:
            # Catch all exceptions, because storage clients raise many types. Remaining files are
            # deleted when the job is deleted.
            log(
                "can't delete the files of the last rounds; they remain until the job is "
                f"deleted: {error}"
            )
        return super().trained()

    def _tensors(self) -> dict[str, Tensor]:
        """Return copies of the tensors, because tensors that share memory, such as tied weights,
        can't be stored in one file."""
        state = self.model.state_dict()
        return {name: one.detach().cpu().clone().contiguous() for name, one in state.items()}
