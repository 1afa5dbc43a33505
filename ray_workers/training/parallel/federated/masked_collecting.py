"""Rounds of clients outside of the cluster with secure aggregation: the server's half of the
protocol, whose messages are files of the round.

The secrets of a round are in this process and in those of its clients alone. So a round that loses
too many clients, or this process, begins anew, under another name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
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
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.collecting import (
    DamagedUpdateError,
    UpdateCollector,
    empty_batch,
    read_file,
    read_parts,
)
from ray_workers.training.parallel.federated.collection_rules import Collection, Next, next_of
from ray_workers.training.parallel.federated.masking_values import loss_of, masking_settings
from ray_workers.training.parallel.federated.rounds import Participant
from ray_workers.training.parallel.federated.secure_round import SecureSum
from ray_workers.training.parallel.federated.storage_listing import names_below

ANSWER_S = 60.0
"""Within which clients answer in the phases in which they don't train, or are lost to the round."""


class RoundBrokenError(Exception):
    """Too few clients are left for the secrets of a round."""


@dataclass(frozen=True)
class MaskedShare(RoundShare):
    """A round that is over: the sum of its updates."""

    total: SecureSum


def refuse_too_few_bits(options: spec.Federated, num_elements: int) -> None:
    """RoundsError if the sum of the updates could overflow."""
    try:
        FixedPoint.of(masking_settings(options, "any", num_elements), options.clients_per_round)
    except ValueError as error:
        raise RoundsError(
            f"federated.secure_aggregation: {error}; http.max_samples bounds the weights"
        ) from error


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
            share = self._masked_share(step, found)
            return Feeding(found.weight, [share])

    def _play(self, opening: RoundReport) -> Aggregate:
        """All phases of a round."""
        server = MaskingServer(masking_settings(self._options, opening.name, self._num_elements))
        opening = replace(opening, update_bytes=self._masked_bytes)
        messages: Mapping[str, bytes] = {}
        while server.phase is not MaskingPhase.ENDED:
            self._store_messages(opening.name, server.phase, messages)
            asked = opening.clients if server.expected is None else sorted(map(int, messages))
            self._collect(server, replace(opening, clients=asked, awaits=server.phase))
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
                self._store(path, f"{name}/{round_files.message_path(phase, int(client))}")
                self._page.move()

    @property
    def _masked_bytes(self) -> int:
        return masking_settings(self._options, "any", self._num_elements).masked_bytes

    def _collect(self, server: MaskingServer, asking: RoundReport) -> None:
        """Take the answers of a phase until it is over. RoundBrokenError."""
        is_first = server.expected is None
        is_long = is_first or server.phase is MaskingPhase.MASKED_INPUT
        deadline_s = self._deadline_s if is_long else min(ANSWER_S, self._deadline_s)
        quorum = max(server.least, self._options.least_updates if is_first else 0)
        asking = replace(asking, quorum=quorum, deadline_s=deadline_s)
        late_at = time.monotonic() + deadline_s
        refused: set[int] = set()
        look = partial(self._take_answers, server, asking.name, refused)
        self._report(asking)
        while True:
            self._look_for(look)
            asked = self._asked(asking)
            accepted = {int(name) for name in server.answered}
            asks_all = asking.clients is None or not is_first
            is_late = time.monotonic() >= late_at
            state = Collection(asked, asks_all, quorum, accepted, refused)
            step = next_of(state, is_late=is_late)
            if step is Next.END:
                return
            if step is Next.ASK_ALL:
                asking = replace(asking, clients=None)
                self._report(asking)
            elif is_late and not is_first:
                raise RoundBrokenError(
                    f"{len(accepted)} clients have answered in {server.phase}, and "
                    f"{server.least} are needed"
                )
            else:
                self._pause()

    def _take_answers(self, server: MaskingServer, name: str, refused: set[int]) -> None:
        folder, phase = f"{self._url}/{name}", server.phase
        for each in names_below(f"{folder}/{round_files.answers_path(phase)}"):
            if not each.isdecimal() or each.startswith(".") or int(each) in refused:
                continue
            client = int(each)
            if str(client) in server.answered:
                continue
            self._page.move()
            try:
                message = read_file(f"{folder}/{round_files.answer_path(phase, client)}")
                if phase is MaskingPhase.MASKED_INPUT:
                    digest = message.decode("ascii", "replace")
                    message = bytes(read_parts(folder, client, digest, self._masked_bytes))
                server.receive(str(client), phase, message)
            except (MessageRefused, DamagedUpdateError) as error:
                log(f"the message of client {client} in {phase} is refused: {error}")
                refused.add(client)

    def _masked_share(self, number: int, found: Aggregate) -> MaskedShare:
        clients = sorted(map(int, found.clients))
        participants = [Participant(client, 1, 1, attacks=False) for client in clients]
        plan = self._plan(number, participants, {*clients})
        loss = loss_of(float(found.mean[-1]), self._options.max_update_norm)
        total = SecureSum(torch.from_numpy(found.sums[:-1].copy()), found.weight, loss, 0)
        return MaskedShare(empty_batch(plan), [], plan, [0] * len(clients), None, total)
