"""The processor time and the bytes of a round of secure aggregation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from benchmarks.figures import ratio_of_medians
from benchmarks.report import Comparison, Result, Row, Table
from dray.secure_aggregation import keys
from dray.secure_aggregation.client import MaskingClient
from dray.secure_aggregation.messages import MaskingPhase, MaskingSettings
from dray.secure_aggregation.server import MaskingServer

VALUES, CLIENTS, ALL_SIZES = 100_000, 100, (10, 30, 100, 300)
LOST = 0.3
PLAIN_BYTES = 4 * VALUES
METHOD = [
    "One process runs a complete round with the server and clients whose updates have "
    f"{VALUES:,} 64-bit numbers. {LOST:.0%} of the clients are lost after exchanging keys. The "
    "figures are the CPU time of the calls on each side, without transport and training.",
    f"The samples and the ratio are for {CLIENTS} clients, and each row of the table is for one "
    "round. The limit is the time of just ChaCha20, as implemented by the package cryptography, "
    "for the masks of one client, which needs every byte of them. A sample is the mean over the "
    "clients in a round. Rounds and limits are measured alternately.",
    "Ratio of medians, with an interval from a bootstrap of the rounds. A/A: odd rounds over "
    "even rounds.",
]


class Cost:
    """Processor seconds of one round: of a client in each phase, as the mean over the remaining
    clients, and of the server."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.sent = 0
        """Bytes, by a client that stays."""
        self.received = 0

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began

    @property
    def of_a_client(self) -> float:
        return sum(self.seconds.values()) - self.seconds["server"]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    ours: list[float] = []
    limits: list[float] = []
    for number in range(num_rounds):
        ours.append(cost_of_round(CLIENTS).of_a_client)
        limits.append(_seconds_of_masks(CLIENTS))
        progress(f"round {number}: {1e3 * ours[-1]:.1f} ms a client, {1e3 * limits[-1]:.1f} ms")
    rows = []
    for size in ALL_SIZES:
        rows.append(_row(size, cost_of_round(size)))
        progress(" | ".join(rows[-1]))
    ratio, same = ratio_of_medians(ours, limits), ratio_of_medians(ours[1::2], ours[::2])
    columns = ["clients", *(f"{phase}, ms" for phase in list(MaskingPhase)[:-1])]
    columns += ["all, ms", "server, ms", "sent, kB", "of plain", "received, kB"]
    return Result(
        name="secure_aggregation",
        title="A round of secure aggregation",
        method=METHOD,
        rows=[Row("a client, all phases", ours), Row("ChaCha20 of its masks (limit)", limits)],
        comparisons=[Comparison("client / limit", num_rounds, ratio, same, "", None)],
        tables=[Table(f"A client, and the server, with {VALUES:,} numbers", columns, rows)],
    )


def cost_of_round(num_clients: int) -> Cost:
    settings = MaskingSettings(
        session="round 1",
        num_values=VALUES,
        threshold=0.6,
        limit=1000.0,
        bits=64,
        max_weight=1000,
    )
    cost, update = Cost(), np.random.default_rng(0).normal(size=VALUES)
    names = [f"client {at}" for at in range(num_clients)]
    clients = {name: MaskingClient(name, settings) for name in names}
    server = MaskingServer(settings)
    messages: Mapping[str, bytes] = dict.fromkeys(names, b"")
    while (phase := server.phase) is not MaskingPhase.ENDED:
        staying = list(messages)
        if phase is MaskingPhase.MASKED_INPUT:
            staying = staying[round(LOST * num_clients) :]
        for name in staying:
            with cost.counted(phase):
                if phase is MaskingPhase.MASKED_INPUT:
                    clients[name].provide(update, 10)
                answer = clients[name].answer(messages[name])
            with cost.counted("server"):
                server.receive(name, phase, answer)
        cost.seconds[phase] /= len(staying)
        cost.sent += len(answer)
        cost.received += len(messages[name])
        with cost.counted("server"):
            messages = server.advance()
    with cost.counted("server"):
        server.aggregate()
    return cost


def _seconds_of_masks(num_clients: int) -> float:
    """Processor seconds for the masks of one client."""
    began = time.process_time()
    for _ in range(num_clients):
        for _ in keys.keystream(bytes(32), 8 * (VALUES + 1)):
            pass
    return time.process_time() - began


def _row(num_clients: int, cost: Cost) -> list[str]:
    in_phases = [cost.seconds[phase] for phase in list(MaskingPhase)[:-1]]
    return [
        str(num_clients),
        *(f"{1e3 * each:.3g}" for each in (*in_phases, cost.of_a_client, cost.seconds["server"])),
        f"{cost.sent / 1e3:.0f}",
        f"{cost.sent / PLAIN_BYTES:.2f}",
        f"{cost.received / 1e3:.0f}",
    ]
