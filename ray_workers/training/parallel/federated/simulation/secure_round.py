"""A round with secure aggregation, in which the ranks simulate the clients and share the work of
the server.

Each rank has the sum of the masked updates of its own clients, and a copy of all other messages to
the server. Clients drop out in the phases that are given in the round's plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dray import spec
from dray.secure_aggregation.client import MaskingClient
from dray.secure_aggregation.fixed_point import FixedPoint
from dray.secure_aggregation.messages import MaskingPhase, TooFewClients
from dray.secure_aggregation.server import MaskingServer
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.federated.masking_values import (
    SecureSum,
    loss_of,
    loss_value,
    masking_settings,
)
from ray_workers.training.parallel.federated.rounds import PHASES
from ray_workers.training.parallel.federated.simulation.client_feed import SimulatedShare


class SecureRound:
    """A rank's part of one round."""

    def __init__(
        self,
        options: spec.Federated,
        mine: SimulatedShare,
        num_elements: int,
        rank: int,
        world_size: int,
        page: HeartbeatPage,
    ) -> None:
        """Raises RoundsError if the encoding has too few bits for the updates."""
        plan = mine.plan
        self._rank, self._world_size, self._page = rank, world_size, page
        max_weight = mine.feed.most_samples if options.privacy is None else 1
        # The two additional values are the loss, and whether the update was left unclipped.
        num_values = num_elements + 2
        self._settings = settings = masking_settings(
            options, f"round {plan.number}", num_values, max_weight
        )
        try:
            encoding = FixedPoint.of(settings, max(1, plan.num_chosen))
        except ValueError as error:
            raise RoundsError(f"federated.secure_aggregation: {error}") from error
        if rank == 0 and plan.number == 1:
            log(
                "secure aggregation rounds all numbers, which causes an error of at most "
                f"{encoding.max_error:.2g}"
            )
        self._server = MaskingServer(settings)
        self._lost_in: dict[str, MaskingPhase | None] = {}
        self._own: dict[str, MaskingClient] = {}
        for at, (client, phase) in enumerate(plan.lost.items()):
            self._join(client, phase, at % world_size)
        for one, owner in zip(plan.participants, mine.owners, strict=True):
            self._join(one.client, one.lost_in, owner)
        self._messages: Mapping[str, bytes] = dict.fromkeys(self._lost_in, b"")
        self._reason: str | None = None
        """The reason why the round has no result; None if it has a result."""

    def _join(self, client: int, lost_in: MaskingPhase | None, owner: int) -> None:
        name = str(client)
        self._lost_in[name] = lost_in
        if owner == self._rank:
            self._own[name] = MaskingClient(name, self._settings)

    def exchange_keys(self) -> None:
        """Run the phases that precede the updates. A collective."""
        for _ in range(2):
            self._exchange()

    def send(
        self, client: int, update: Tensor, weight: int, loss: float, *, is_within: bool
    ) -> None:
        """Send the masked update of one of this rank's clients."""
        name, phase = str(client), MaskingPhase.MASKED_INPUT
        if self._reason is not None:
            return
        limit = self._settings.limit  # the same limit as for the elements of the update
        facts = np.array([loss_value(loss, limit), limit * is_within])
        own = self._own[name]
        own.provide(np.concatenate([update.cpu().numpy(), facts]), weight)
        self._server.receive(name, phase, own.answer(self._messages[name]))

    def total(self) -> SecureSum | None:
        """Run the rest of the round. Returns None if too many clients dropped out. A collective."""
        if self._reason is None:
            for sent in process_group.gathered(self._server.answered, self._world_size):
                self._server.received_elsewhere(sent - self._own.keys())
            self._advance()
        for _ in range(2):
            self._exchange()
        if self._reason is not None:
            if self._rank == 0:
                log(f"{self._settings.session} does not count: {self._reason}")
            return None
        own = self._server.partial_sum(self._rank, self._world_size)
        # Reinterpret the integers as signed for torch; the sum is the same modulo 2**n.
        total = torch.from_numpy(own.view(own.dtype.str.replace("u", "i")))
        process_group.add_up(total, self._world_size)
        found = self._server.decode(total.numpy().view(own.dtype))
        limit = self._settings.limit
        loss, within = loss_of(float(found.mean[-2]), limit), round(found.sums[-1] / limit)
        return SecureSum(torch.from_numpy(found.sums[:-2]), found.weight, loss, within)

    def _exchange(self) -> None:
        """Run a phase with small messages, all of which every part of the server receives."""
        if self._reason is not None:
            return
        phase, answers = self._server.phase, {}
        for name, client in self._own.items():
            if name in self._messages and self._answers_in(name, phase):
                answers[name] = client.answer(self._messages[name])
                self._page.move()
        for each in process_group.gathered(answers, self._world_size):
            for name, answer in each.items():
                self._server.receive(name, phase, answer)
        self._advance()

    def _answers_in(self, name: str, phase: MaskingPhase) -> bool:
        lost_in = self._lost_in[name]
        return lost_in is None or PHASES.index(phase) < PHASES.index(lost_in)

    def _advance(self) -> None:
        try:
            self._messages = self._server.advance()
        except TooFewClients as error:
            self._reason = str(error)
