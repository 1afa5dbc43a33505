"""The silo's side of federated training: trains on the silo's own samples, and sends the updates to
the aggregator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dray import spec
from dray.train.kv.connection import TensorConnection, connect
from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training import devices
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload, at_least_float32
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.data.prefetcher import Piece
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.devices import CPU
from ray_workers.training.parallel.federated.client_batches import batches_of
from ray_workers.training.parallel.federated.client_training import ClientTraining, Flat, client_lr
from ray_workers.training.parallel.federated.silos.aggregator import LOSS
from ray_workers.training.parallel.federated.silos.server import AGGREGATOR_KEY
from ray_workers.training.parallel.gradients import EngineParts
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.strategy import autocast

SAMPLES_AT_ONCE = 256
"""Batch size of evaluations."""


class GivenRound(NamedTuple):
    """A round received from the aggregator."""

    number: int
    evaluates: bool
    correction: Tensor | None


class SiloClient:
    """Runs the rounds of one silo until the connection ends."""

    def __init__(
        self,
        document: spec.JobSpec,
        silo: int,
        workload: Workload,
        page: HeartbeatPage,
        connection: TensorConnection,
    ) -> None:
        """silo: the silo's index in the document. workload: contains the silo's own samples."""
        federated = document.federated
        assert federated is not None
        self._train, self._federated = document.train, federated
        self._silo = silo
        self._workload = workload
        self._page = page
        self._connection = connection
        self._device = CPU
        self._model = workload.model
        materialise(self._model, self._device, document.train.seed)
        self._flat = Flat(self._model, has_buffers=True)
        self._autocast = partial(autocast, document.train.precision, self._device)
        parts = EngineParts(self._model, workload.loss_sum, self._autocast)
        self._clients = ClientTraining(parts, document.train, federated)
        self._samples = on_device(workload.train, self._device)

    @classmethod
    def of(
        cls,
        document: spec.JobSpec,
        silo: int,
        workload: Workload,
        page: HeartbeatPage,
        store: Store,
        limit: timedelta,
    ) -> Self:
        """Connect to the aggregator. Raises DataError if the aggregator has read different public
        data."""
        store.wait([AGGREGATOR_KEY], limit)
        connection = connect(store, AGGREGATOR_KEY)
        connection.send({"silo": silo, "fingerprint": workload.fingerprint})
        if not connection.receive()[0]["is_same"]:
            raise DataError(
                "this silo and the aggregator have read different data from data.source, which "
                "must contain the same data on all nodes"
            )
        return cls(document, silo, workload, page, connection)

    def next_round(self) -> GivenRound:
        """Wait for the silo's next round, and load the round's weights into the model."""
        self._page.enter(RankPhase.DATA, TimeCategory.DATA_WAIT)
        header, payload = self._connection.receive()
        vectors, size = payload.view(torch.float32), self._flat.num_elements
        self._flat.write(vectors[:size])
        correction = vectors[size:] if len(vectors) > size else None
        return GivenRound(header["round"], header["evaluates"], correction)

    def play(self, given: GivenRound) -> None:
        """Run one round."""
        page, number = self._page, given.number
        page.enter(RankPhase.COMPUTE, TimeCategory.USEFUL)
        metrics = self._measured() if given.evaluates else {}
        devices.seed(self._device, derive_seed("step", self._train.seed, number, self._silo))
        options, num_samples = self._federated, len(self._samples)
        num_steps, seed = options.steps_of(num_samples), (self._train.seed, number, self._silo)
        own = torch.arange(num_samples)
        batches = batches_of(self._samples, own, num_steps, options.batch_size, *seed)
        lr = client_lr(self._train, number, options.rounds)
        update, loss = self._clients.train(self._moving(batches), lr, given.correction)
        page.enter(RankPhase.EXCHANGE, TimeCategory.USEFUL)
        metrics[LOSS] = loss
        reported = {name: value for name, value in metrics.items() if name in options.metrics}
        about = {"num_samples": num_samples, "num_steps": num_steps, "metrics": reported}
        self._connection.send({"round": number, **about}, update)
        page.commit(number)

    def close(self) -> None:
        self._connection.close()

    def _moving(self, batches: Iterable[Piece]) -> Iterator[Piece]:
        """Record progress at each batch, and raise ConnectionLost if the connection to the
        aggregator is lost."""
        for batch in batches:
            self._page.move()
            self._connection.check_open()
            yield batch

    @torch.no_grad()
    def _measured(self) -> dict[str, float]:
        """Measure `val/loss` and the recipe's metrics on the silo's own validation samples."""
        samples = on_device(self._workload.validation, self._device)
        metrics, total = self._workload.metrics(), 0.0
        self._model.eval()
        for at in torch.split(torch.arange(len(samples)), SAMPLES_AT_ONCE):
            self._page.move()
            inputs, targets = samples.take(at)
            with self._autocast():
                outputs = at_least_float32(self._model(inputs))
            metrics.update(outputs, targets)
            total += float(self._workload.validation_loss_sum(outputs, targets))
        self._model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some metrics are undefined for few samples
            found = metrics.compute()
        return {"val/loss": total / len(samples)} | {
            f"val/{name}": float(value) for name, value in found.items()
        }
