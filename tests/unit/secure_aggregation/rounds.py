"""A round of secure aggregation in the test's process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dray.secure_aggregation.client import MaskingClient
from dray.secure_aggregation.fixed_point import Aggregate
from dray.secure_aggregation.messages import MaskingPhase, MaskingSettings
from dray.secure_aggregation.server import MaskingServer

PHASES = list(MaskingPhase)[:-1]
Values = npt.NDArray[np.float64]


def settings(**changes: Any) -> MaskingSettings:
    sizes = {"num_values": 50, "threshold": 0.6, "limit": 10.0, "bits": 64, "max_weight": 100}
    return MaskingSettings.model_validate({"session": "job/1/1", **sizes, **changes})


class Round:
    """Clients with random updates and weights, and a server that keeps everything it receives."""

    def __init__(self, num_clients: int = 10, **changes: Any) -> None:
        self.settings = settings(**changes)
        self.server = MaskingServer(self.settings)
        generator = np.random.default_rng(0)
        self.names = [f"client {at:03}" for at in range(num_clients)]
        self.clients = {name: MaskingClient(name, self.settings) for name in self.names}
        size = num_clients, self.settings.num_values
        self.updates: dict[str, Values] = dict(
            zip(self.names, generator.uniform(-9.0, 9.0, size), strict=True)
        )
        self.weights = {name: int(generator.integers(1, 101)) for name in self.names}
        for name, client in self.clients.items():
            client.provide(self.updates[name], self.weights[name])
        self.messages: Mapping[str, bytes] = dict.fromkeys(self.names, b"")
        self.sent: list[bytes] = []

    def play(self, lost: Mapping[MaskingPhase, Collection[str]] | None = None) -> Aggregate:
        """To the end; lost: the clients that answer no more, by the first phase of which they send
        nothing."""
        while self.server.phase is not MaskingPhase.ENDED:
            self.phase((lost or {}).get(self.server.phase, ()))
        return self.server.aggregate()

    def until(self, phase: MaskingPhase) -> None:
        while self.server.phase is not phase:
            self.phase()

    def phase(self, lost: Collection[str] = ()) -> None:
        phase = self.server.phase
        for name, message in self.messages.items():
            if name not in lost:
                answer = self.clients[name].answer(message)
                self.sent.append(answer)
                self.server.receive(name, phase, answer)
        self.messages = self.server.advance()

    def plain_sum(self, names: Collection[str]) -> Values:
        return np.sum([self.weights[name] * self.updates[name] for name in names], axis=0)

    def plain_mean(self, names: Collection[str]) -> Values:
        return self.plain_sum(names) / sum(self.weights[name] for name in names)
