"""Rounds of clients outside of the cluster with secure aggregation: the server's half of the
protocol, whose messages are files of the round.

The secrets of a round are in this process and in those of its clients alone. So a round that loses
too many clients, or this process, begins anew, under another name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dray import spec
from dray.secure_aggregation.errors import MessageRefused, TooFewClients, WrongShares
from dray.secure_aggregation.fixed_point import Aggregate, FixedPoint
from dray.secure_aggregation.messages import MaskingPhase
from dray.secure_aggregation.server import MaskingServer
from ray_workers.shared import round_files
from ray_workers.shared.frames import RoundReport
from ray_workers.shared.job_log import log
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.data.prefetcher import Feeding
from ray_workers.training.parallel.federated.masking_values import (
    SecureSum,
    loss_of,
    outside_settings,
)
from ray_workers.training.parallel.federated.outside.sent_updates import (
    DamagedUpdateError,
    names_below,
    read_file,
    read_parts,
)
from ray_workers.training.parallel.federated.outside.update_collector import (
    MaskedShare,
    UpdateCollector,
)
from ray_workers.training.parallel.federated.rounds import Participant

ANSWER_S = 60.0
"""Within which clients answer in the phases in which they don't train, or are lost to the round."""


class RoundBrokenError(Exception):
    """Too few clients are left for the secrets of a round."""


def refuse_too_few_bits(options: spec.Federated, num_elements: int) -> None:
    """RoundsError if the sum of the updates could overflow."""
    try:
        FixedPoint.of(outside_settings(options, "any", num_elements), options.clients_per_round)
    except ValueError as error:
        raise RoundsError(
            f"federated.secure_aggregation: {error}; http.max_samples bounds the weights"
        ) from error


class MaskedAnswers:
    """The answers of clients in the phase that the server is in."""

    def __init__(self, server: MaskingServer, folder: str, masked_bytes: int) -> None:
        """folder: URL of the files of the round. masked_bytes: the size of a masked update."""
        self._server = server
        self._folder = folder
        self._masked_bytes = masked_bytes
        self.refused: set[int] = set()

    @property
    def accepted(self) -> set[int]:
        return {int(name) for name in self._server.answered}

    def look(self, moved: Callable[[], None]) -> None:
        server, phase = self._server, self._server.phase
        for name in names_below(f"{self._folder}/{round_files.answers_path(phase)}"):
            if not name.isdecimal() or int(name) in self.accepted | self.refused:
                continue
            moved()
            client = int(name)
            try:
                message = read_file(f"{self._folder}/{round_files.answer_path(phase, client)}")
                if phase is MaskingPhase.MASKED_INPUT:
                    digest = message.decode("ascii", "replace")
                    parts = read_parts(self._folder, client, digest, self._masked_bytes)
                    message = bytes(parts)
                server.receive(str(client), phase, message)
            except (MessageRefused, DamagedUpdateError) as error:
                log(f"the message of client {client} in {phase} is refused: {error}")
                self.refused.add(client)


class MaskedCollector(UpdateCollector):
    """The feed of a rank that learns nothing but sums."""

    def at(self, step: int) -> Feeding:
        while True:
            opening = self._publish(step, secrets.token_hex(16))
            try:
                found = self._play(opening)
            except RoundBrokenError as error:
                log(f"round {step} begins anew: {error}")
                continue
            self._report(replace(opening, is_open=False))
            return Feeding(found.weight, [self._share(step, found)])

    def _play(self, opening: RoundReport) -> Aggregate:
        """All phases of a round."""
        settings = outside_settings(self._options, opening.name, self._num_elements)
        server = MaskingServer(settings)
        opening = replace(opening, update_bytes=settings.masked_bytes)
        messages: Mapping[str, bytes] = {}
        while server.phase is not MaskingPhase.ENDED:
            self._store_messages(opening.name, server.phase, messages)
            asked = opening.clients if server.expected is None else sorted(map(int, messages))
            self._play_phase(server, replace(opening, clients=asked, awaits=server.phase))
            try:
                messages = server.advance()
            except (TooFewClients, WrongShares) as error:
                raise RoundBrokenError(str(error)) from error
        return server.aggregate()

    def _store_messages(
        self, name: str, phase: MaskingPhase, messages: Mapping[str, bytes]
    ) -> None:
        with TemporaryDirectory(prefix="dray-round-") as scratch:
            for client, message in messages.items():
                path = Path(scratch, "message")
                path.write_bytes(message)
                place = round_files.message_path(phase, int(client))
                self._publisher.store(path, f"{name}/{place}")
                self._page.move()

    def _play_phase(self, server: MaskingServer, asking: RoundReport) -> None:
        """Take the answers of a phase until it is over. RoundBrokenError."""
        is_first = server.expected is None
        is_long = is_first or server.phase is MaskingPhase.MASKED_INPUT
        asking = replace(
            asking,
            quorum=max(server.least, self._options.least_updates if is_first else 0),
            deadline_s=self._deadline_s if is_long else min(ANSWER_S, self._deadline_s),
        )
        answers = MaskedAnswers(server, f"{self._url}/{asking.name}", asking.update_bytes)
        if self._collect(asking, answers, asks_all=is_first) is None:
            raise RoundBrokenError(
                f"{len(server.answered)} clients have answered in {server.phase}, and "
                f"{server.least} are needed"
            )

    def _share(self, number: int, found: Aggregate) -> MaskedShare:
        clients = sorted(map(int, found.clients))
        plan = self._plan(number, [Participant(client, 1, 1) for client in clients], {*clients})
        loss = loss_of(float(found.mean[-1]), self._options.max_update_norm)
        total = SecureSum(torch.from_numpy(found.sums[:-1].copy()), found.weight, loss, 0)
        return MaskedShare.of(plan, total=total)
