"""The aggregator's side of the connections to silos. Each connection has its own thread.

Silos and their aggregator don't form a process group, so that a broken connection affects only two
processes. For the same reason, workers and parameter servers don't form a process group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from dray.spec import Federated
from dray.train.kv.connection import ConnectionLost, TensorConnection
from ray_workers.shared.frames import SiloRoundReport
from ray_workers.training.parallel.federated.aggregation.update_checks import Verdict, judged
from ray_workers.training.parallel.federated.silos.collector import RoundCollector, SiloUpdate

AGGREGATOR_KEY: Final = "federated-aggregator"
"""Key of the aggregator's address and secret in the attempt's store."""
LOOK_S: Final = 0.25
"""Maximum number of seconds between two checks of an open round."""
MAX_COUNT: Final = 2**31
"""Maximum number of samples, and of steps, of a silo in a round."""


@dataclass(frozen=True)
class RoundStart:
    """The data that silos receive at the beginning of a round."""

    number: int
    weights: Tensor
    """float32 (elements,), in the order of `Flat`."""
    configure: Callable[[int], Tensor | None]
    """Maps a silo's index to the vector that is added to its gradients."""
    evaluates: bool
    """Whether silos evaluate the weights on their own validation samples."""


class SiloServer:
    """Sends the weights of each round to the silos and receives their updates, under one lock."""

    def __init__(self, collector: RoundCollector, options: Federated, fingerprint: str) -> None:
        """fingerprint: hash of the data that all ranks read."""
        self._collector = collector
        self._options = options
        self._num_silos = options.clients
        self._fingerprint = fingerprint
        self._lock = threading.Condition()
        self._connections: dict[int, TensorConnection] = {}
        self._start: RoundStart | None = None

    def play(self, start: RoundStart, look: Callable[[SiloRoundReport], None]) -> Played:
        """Make the silos run a round. look: called repeatedly with the state of the round; may
        raise an exception to abort the round."""
        collector = self._collector
        with self._lock:
            self._start = start
            collector.begin(start.number, time.monotonic())
            self._lock.notify_all()
        while True:
            with self._lock:
                if (left_s := collector.wait_s(time.monotonic())) <= 0:
                    num_late = collector.num_late
                    return Played(collector.end(), num_late)
                self._lock.wait(min(left_s, LOOK_S))
                found = collector.state(time.monotonic())
            look(found)

    def serve(self, connection: TensorConnection) -> None:
        """Serve one silo until its connection is lost."""
        hello, _ = connection.receive()
        silo = hello["silo"]
        if type(silo) is not int or not 0 <= silo < self._num_silos:
            raise ConnectionLost(f"the job document does not define a silo {silo}")
        connection.send({"is_same": hello["fingerprint"] == self._fingerprint})
        with self._lock:
            older = self._connections.get(silo)
            if older is not None:  # the silo's node disappeared without closing the connection
                older.close()
            self._connections[silo] = connection
            self._collector.join(silo)
        try:
            while True:
                start = self._next_round(silo, connection)
                self._send_round(silo, connection, start)
                header, payload = connection.receive(start.weights.nbytes)
                self._take(silo, connection, start, header, payload)
        finally:
            self._lose(silo, connection)

    def _next_round(self, silo: int, connection: TensorConnection) -> RoundStart:
        with self._lock:
            while self._collector.wants(silo) is None:
                self._lock.wait(LOOK_S)
                connection.check_open()
            assert self._start is not None
            return self._start

    def _send_round(self, silo: int, connection: TensorConnection, start: RoundStart) -> None:
        correction = start.configure(silo)
        vectors = [start.weights] if correction is None else [start.weights, correction]
        connection.send({"round": start.number, "evaluates": start.evaluates}, *vectors)

    def _take(
        self,
        silo: int,
        connection: TensorConnection,
        start: RoundStart,
        header: Mapping[str, Any],
        payload: Tensor,
    ) -> None:
        options = self._options
        try:
            number, update = int(header["round"]), _update_of(header, payload, options.metrics)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ConnectionLost(f"the message is not a valid update: {error}") from None
        verdict, _ = judged(update.update, len(start.weights), options.max_update_norm)
        update = replace(update, is_refused=verdict is not Verdict.ACCEPTED)
        with self._lock:
            if self._connections.get(silo) is connection:
                self._collector.take(silo, number, update)
                self._lock.notify_all()

    def _lose(self, silo: int, connection: TensorConnection) -> None:
        with self._lock:
            if self._connections.get(silo) is connection:
                del self._connections[silo]
                self._collector.lost(silo)
                self._lock.notify_all()


@dataclass(frozen=True)
class Played:
    """The result of a finished round."""

    updates: Mapping[int, SiloUpdate]
    """The updates, sorted by silo."""
    num_late: int
    """Number of silos that were connected at the deadline but had not sent their updates."""


def _update_of(
    header: Mapping[str, Any], payload: Tensor, listed_metrics: Sequence[str]
) -> SiloUpdate:
    num_samples, num_steps = int(header["num_samples"]), int(header["num_steps"])
    if not (1 <= num_samples <= MAX_COUNT and 1 <= num_steps <= MAX_COUNT):
        raise ValueError(f"invalid update: {num_samples} samples in {num_steps} steps")
    sent = dict(header["metrics"])
    metrics = {name: float(sent[name]) for name in listed_metrics if name in sent}
    return SiloUpdate(num_samples, num_steps, payload.view(torch.float32), metrics)
