"""The strategy of the aggregating rank: each round is one step, for which the silos compute the
updates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from dray import train
from dray.secure_aggregation.messages import MaskingPhase
from dray.train.kv.connection import listening
from ray_workers.shared.frames import SiloRoundReport
from ray_workers.training.core.errors import LeaveRequested
from ray_workers.training.core.progress import mark_finished
from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed, Feeding
from ray_workers.training.parallel.federated.aggregation.update_checks import (
    Reported,
    mean,
    trusted,
)
from ray_workers.training.parallel.federated.client_batches import RoundFeed, RoundShare
from ray_workers.training.parallel.federated.engine import FederatedEngine
from ray_workers.training.parallel.federated.rounds import Participant, RoundPlan
from ray_workers.training.parallel.federated.server import ServerStrategy
from ray_workers.training.parallel.federated.silos.collector import (
    RoundCollector,
    RoundNotices,
    SiloUpdate,
)
from ray_workers.training.parallel.federated.silos.server import (
    AGGREGATOR_KEY,
    RoundStart,
    SiloServer,
)
from ray_workers.training.parallel.strategy import StrategyContext, TrainingLoop

if TYPE_CHECKING:
    from ray_workers.training.elastic.rendezvous import RendezvousHandler
    from ray_workers.training.loop.trainer import Trainer

LOSS = "train/loss"


class SiloEngine(FederatedEngine):
    """Combines the updates of the silos."""

    arrived: Mapping[int, SiloUpdate] = {}
    """The updates of the current round, keyed by silo."""

    def round_start(self, number: int) -> RoundStart:
        """Return the weights and corrections of the next round, neither of which changes during the
        round."""
        every = self._options.evaluate_every
        return RoundStart(
            number,
            self._flat.values(),
            self.algorithm.configure,
            evaluates=number % every == 0 or number == self._options.rounds,
        )

    def _update_of(self, participant: Participant, mine: RoundShare) -> tuple[Tensor, float]:
        sent = self.arrived[participant.client]
        return sent.update, sent.metrics.get(LOSS, 0.0)

    def step_metrics(self) -> dict[str, float]:
        return super().step_metrics() | self._of_silos()

    def _of_silos(self) -> dict[str, float]:
        """Return the metrics of each silo, and their means weighted by the silos' samples."""
        silos, found = self._options.silos, dict[str, float]()
        assert silos is not None
        by_name: dict[str, list[Reported]] = {}
        for silo, sent in self.arrived.items():
            weight = self._samples_that_count(silo)
            for name, value in sent.metrics.items():
                found[f"silo/{silos[silo].name}/{name}"] = value
                by_name.setdefault(name, []).append(Reported(value, weight))
        for name, reported in by_name.items():
            if (of_all := mean(trusted(reported))) is not None:
                found[f"silos/{name}"] = of_all
        return found

    def participants(self) -> list[Participant]:
        """Return the participants of the last round."""
        return [
            Participant(
                *(silo, self._samples_that_count(silo), sent.num_steps),
                reports_loss=LOSS in sent.metrics,
            )
            for silo, sent in self.arrived.items()
        ]

    def _samples_that_count(self, silo: int) -> int:
        silos = self._options.silos
        assert silos is not None
        return min(self.arrived[silo].num_samples, silos[silo].max_samples)


class SiloFeed(RoundFeed):
    """A feed that makes the silos run a round instead of reading a batch."""

    def __init__(self, engine: SiloEngine, server: SiloServer, given: StrategyContext) -> None:
        self._engine = engine
        self._server = server
        self._given = given
        self._notices = RoundNotices(lambda report: train.emit(report.KIND, report.body()))

    def at(self, step: int) -> Feeding:
        """Run the round with number `step`, and return it. Raises LeaveRequested if this rank is
        asked to leave during the round."""
        federated = self._given.spec.federated
        assert federated is not None
        self._notices.begin(time.monotonic())
        played = self._server.play(self._engine.round_start(step), self._look)
        self._notices.end()
        self._engine.arrived = played.updates
        participants = self._engine.participants()
        gone = (silo for silo in range(federated.clients) if silo not in played.updates)
        lost = dict.fromkeys(gone, MaskingPhase.MASKED_INPUT)
        plan = RoundPlan(step, participants, federated.clients, played.num_late, lost)
        return Feeding(plan.num_samples, [RoundShare.of(plan)])

    def _look(self, found: SiloRoundReport) -> None:
        if self._given.page.is_asked_to_leave:
            raise LeaveRequested
        self._notices.look(found, time.monotonic())


class SiloAggregator(ServerStrategy):
    """The strategy of the aggregating rank. This rank holds the server's weights and state, has no
    data of a silo, and is in no process group with silos."""

    _engine: SiloEngine

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given, SiloEngine(given))
        options = self._options
        collector = RoundCollector(options.clients, options.least_updates, options.deadline_s)
        self.server = SiloServer(collector, options, given.workload.fingerprint)

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        return SiloFeed(self._engine, self.server, self.given)

    def run(self, trainer: Trainer, rendezvous: RendezvousHandler, train: TrainingLoop) -> None:
        store = rendezvous.meet_without_group()
        with listening(store, AGGREGATOR_KEY, trainer.task.master_addr, self.server.serve):
            train(trainer, rendezvous)
            mark_finished(store, trainer.progress.step)
