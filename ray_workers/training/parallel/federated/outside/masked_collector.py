"""Server side of secure aggregation with clients outside the cluster. The protocol's messages are
files of the round.

The round's secrets exist only in this process and on its clients. Therefore, if this process or too
many clients are lost, the round is restarted under another name. Clients that have lied are
excluded from later rounds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from dray import spec
from dray.secure_aggregation.fixed_point import Aggregate, FixedPoint
from dray.secure_aggregation.messages import (
    LEAST_CLIENTS,
    MaskingPhase,
    MessageRefused,
    TooFewClients,
    WrongShares,
)
from dray.secure_aggregation.server import MaskingServer
from ray_workers.shared import round_files
from ray_workers.shared.frames import RoundReport, RoundTroubleReport
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
from ray_workers.training.parallel.strategy import StrategyContext

ANSWER_S = 60.0
"""Time limit in seconds for clients' responses in phases without training. Later responses are
ignored."""
TOLERANCE = 1e-6
"""Relative tolerance for rounding errors in a norm."""
MAX_BROKEN_ROUNDS = 10
"""Number of consecutive broken rounds after which the job fails."""
MAX_NAMED = 20
"""Maximum number of clients that a message lists."""


class RoundBrokenError(Exception):
    """Raised if a round ends without a result."""

    def __init__(self, reason: str, gone: Collection[str] = ()) -> None:
        """gone: clients that stopped responding during the round."""
        super().__init__(reason)
        self.gone = {int(name) for name in gone}


def refuse_too_few_bits(options: spec.Federated, num_elements: int) -> None:
    """Raise RoundsError if the sum of the updates could overflow."""
    try:
        FixedPoint.of(outside_settings(options, "any", num_elements), options.clients_per_round)
    except ValueError as error:
        raise RoundsError(
            f"federated.secure_aggregation: {error} (http.max_samples limits the weight of each "
            "client)"
        ) from error


class MaskedAnswers:
    """The clients' responses in the server's current phase."""

    def __init__(self, server: MaskingServer, folder: str, masked_bytes: int) -> None:
        """folder: URL of the round's files. masked_bytes: the size of a masked update."""
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
                log(f"message from client {client} in phase {phase} rejected: {error}")
                self.refused.add(client)


class MaskedCollector(UpdateCollector):
    """The feed of an aggregating rank that sees only sums of updates."""

    def __init__(
        self,
        given: StrategyContext,
        num_elements: int,
        model: Callable[[], dict[str, Tensor]],
        liars: set[int],
    ) -> None:
        """liars: the set of clients that have lied in any round of the job. This collector adds
        new liars to the set."""
        super().__init__(given, num_elements, model)
        self._liars = liars
        self._oldest_version = 1
        """The oldest version of the protocol that clients are allowed to use."""

    def at(self, step: int) -> Feeding:
        """Run the round. Raises RoundsError if the round fails too often."""
        resting = set[int]()
        reason = ""
        for again in range(MAX_BROKEN_ROUNDS):
            opening = self._publish_to(step, resting, again)
            settings = outside_settings(self._options, opening.name, self._num_elements)
            server = MaskingServer(settings, self._oldest_version)
            try:
                found = self._play(replace(opening, update_bytes=settings.masked_bytes), server)
                self._check(found)
            except RoundBrokenError as error:
                reason = str(error)
                resting |= error.gone
                message = f"round {step} is restarted: {reason}"
                log(message)
                self._report(RoundTroubleReport(step, [], message))
                continue
            finally:
                self._leave_out(step, server)
            self._report(replace(opening, is_open=False))
            return Feeding(found.weight, [self._share(step, found, opening.clients)])
        raise RoundsError(
            f"round {step} of secure aggregation failed {MAX_BROKEN_ROUNDS} times in a row. Last "
            f"failure: {reason}"
        )

    def _publish_to(self, step: int, resting: Set[int], again: int) -> RoundReport:
        """Open the round to clients that have not lied.

        resting: clients that caused an earlier attempt at this round to fail, but might be honest.
        Such clients are asked again in this round only if too few other clients remain.
        """
        options = self._options
        least = max(options.least_updates, LEAST_CLIENTS)
        honest = [client for client in range(options.clients) if client not in self._liars]
        if len(honest) < least:
            raise RoundsError(
                f"{len(self._liars)} of the {options.clients} clients have lied in secure "
                f"aggregation and are excluded, but a round needs at least {least} clients"
            )
        rested = [client for client in honest if client not in resting]
        eligible = rested if len(rested) >= least else honest
        self._candidates = honest if self._liars else None
        if len(eligible) == options.clients and not again:
            clients = self._chosen(step)
        else:
            clients = self._rounds.chosen_of(eligible, step, again)
        return self._publish(step, clients, secrets.token_hex(16))

    def _play(self, opening: RoundReport, server: MaskingServer) -> Aggregate:
        """Run all phases of a round."""
        messages: Mapping[str, bytes] = {}
        while server.phase is not MaskingPhase.ENDED:
            self._store_messages(opening.name, server.phase, messages)
            asked = opening.clients if server.expected is None else sorted(map(int, messages))
            self._play_phase(server, replace(opening, clients=asked, awaits=server.phase))
            try:
                messages = server.advance()
            except TooFewClients as error:
                raise RoundBrokenError(str(error), self._gone(server)) from error
            except WrongShares as error:
                if server.version == 1:
                    self._oldest_version = 2
                raise RoundBrokenError(str(error), server.lost_secrets) from error
        return server.aggregate()

    def _check(self, found: Aggregate) -> None:
        """Raise RoundBrokenError if no set of updates that the document allows has this sum. The
        cause is a client that has masked an invalid update, but the masks hide which client it
        was."""
        assert self._options.http is not None
        most = len(found.clients) * self._options.http.max_samples
        limit = self._options.max_update_norm * (1 + TOLERANCE)
        is_sound = len(found.clients) <= found.weight <= most
        if is_sound:
            norm = float(np.linalg.norm(found.mean[:-1]))
            is_sound = norm <= limit and abs(found.mean[-1]) <= limit
        if not is_sound:
            raise RoundBrokenError(
                "at least one client has masked an invalid update: the sum is impossible for "
                "updates within federated.max_update_norm and weights within http.max_samples"
            )

    def _leave_out(self, step: int, server: MaskingServer) -> None:
        """Log the clients that have lied in this round, and exclude them from later rounds."""
        for owner, holder in server.disputes[:MAX_NAMED]:
            log(
                f"round {step}: client {holder}'s share of client {owner}'s secret is wrong: one "
                "of the two clients has lied"
            )
        found = {int(name): lie for name, lie in server.liars.items()}
        self._liars.update(found)
        if not found:
            return
        named = [f"client {client}: {lie}" for client, lie in sorted(found.items())]
        more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        message = (
            f"clients that sent false data in round {step} are excluded from all later rounds: "
        )
        message += "; ".join(named[:MAX_NAMED]) + more
        log(message)
        self._report(RoundTroubleReport(step, sorted(found), message))

    @staticmethod
    def _gone(server: MaskingServer) -> Set[str]:
        """Return the clients that have started the round but have not responded in this phase."""
        return (server.expected or frozenset()) - server.answered

    def _store_messages(
        self, name: str, phase: MaskingPhase, messages: Mapping[str, bytes]
    ) -> None:
        with TemporaryDirectory(prefix="dray-round-") as scratch:
            for client, message in messages.items():
                path = Path(scratch, "message")
                path.write_bytes(message)
                message_path = round_files.message_path(phase, int(client))
                self._publisher.store(path, f"{name}/{message_path}")
                self._page.move()

    def _play_phase(self, server: MaskingServer, asking: RoundReport) -> None:
        """Collect the responses of a phase until it ends. Raises RoundBrokenError."""
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
                f"{len(server.answered)} clients responded in phase {server.phase}, but at least "
                f"{server.least} are required",
                self._gone(server),
            )

    def _share(self, number: int, found: Aggregate, asked: Sequence[int] | None) -> MaskedShare:
        clients = sorted(map(int, found.clients))
        participants = [Participant(client, 1, 1) for client in clients]
        chosen = range(self._options.clients) if asked is None else asked
        plan = self._plan(number, participants, {*clients}, chosen)
        loss = loss_of(float(found.mean[-1]), self._options.max_update_norm)
        total = SecureSum(torch.from_numpy(found.sums[:-1].copy()), found.weight, loss, 0)
        return MaskedShare.of(plan, total=total)
