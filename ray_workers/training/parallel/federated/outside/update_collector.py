"""Rounds with clients outside the cluster: publishes a model, and waits for updates.

The complete state of a round is stored outside this process: its model and updates are files in the
job's storage, under a name that depends on the weights. The next attempt starts with the same
weights, so it finds the updates received so far, and doesn't count any of them twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from dray import train
from dray.secure_aggregation.messages import MaskingPhase
from dray.spec.federated.parts import Http
from dray.train import files, storage_faults
from dray.train.storage_faults import StorageError
from ray_workers.shared.frames import RoundReport, RoundTroubleReport
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.shared.round_files import SentUpdate
from ray_workers.training.core.errors import LeaveRequested
from ray_workers.training.data.prefetcher import Feeding
from ray_workers.training.parallel.federated.client_batches import RoundFeed, RoundShare
from ray_workers.training.parallel.federated.masking_values import SecureSum
from ray_workers.training.parallel.federated.outside.publisher import RoundPublisher
from ray_workers.training.parallel.federated.outside.sent_updates import SentUpdates, read_update
from ray_workers.training.parallel.federated.rounds import (
    Collection,
    Next,
    Participant,
    RoundPlan,
    Rounds,
    next_of,
)
from ray_workers.training.parallel.strategy import StrategyContext

LOOK_S = 0.2
"""Seconds between two checks for updates in a local folder. For other storage, the interval is
`REMOTE_LOOK_S`."""
REMOTE_LOOK_S = 2.0


@dataclass(frozen=True)
class MaskedShare(RoundShare):
    """A finished round with secure aggregation."""

    total: SecureSum


class RoundAnswers(Protocol):
    """The clients' responses received so far."""

    @property
    def accepted(self) -> Set[int]:
        """The clients whose responses count."""

    @property
    def refused(self) -> Set[int]:
        """The clients whose responses were rejected."""

    def look(self, moved: Callable[[], None]) -> None:
        """Read the new responses. Raises StorageError. moved: called before each response is
        read."""


@dataclass(frozen=True)
class CollectedShare(RoundShare):
    """A finished round, whose updates are all on rank 0."""

    sent: Mapping[int, SentUpdate]
    """The updates, by client."""
    folder: str
    """URL of the round's files."""

    def update_of(self, client: int, num_elements: int) -> Tensor:
        """Read an update. Raises DamagedUpdateError if a part has changed since it was received."""
        return read_update(self.folder, self.sent[client], num_elements)


class UpdateCollector(RoundFeed):
    """The feed of the aggregating rank, with rounds instead of batches, and updates instead of
    samples."""

    def __init__(
        self, given: StrategyContext, num_elements: int, model: Callable[[], dict[str, Tensor]]
    ) -> None:
        """model: returns the tensors from which clients start a round."""
        options = given.spec.federated
        assert options is not None
        assert options.http is not None
        self._http: Http = options.http
        assert options.deadline_s is not None
        self._deadline_s = options.deadline_s
        self._options = options
        self._page: HeartbeatPage = given.page
        self._url = given.rounds_url
        self._num_elements = num_elements
        self._publisher = RoundPublisher(given, num_elements, model)
        self._rounds = Rounds(options, (), given.spec.train.seed)
        self._candidates: list[int] | None = None
        """The clients that may take part; None for all clients of the job."""
        self._failing_since: float | None = None
        """Time at which the storage stopped responding; None while it responds."""
        self._look_s = LOOK_S if files.local_path(self._url) is not None else REMOTE_LOOK_S

    def at(self, step: int) -> Feeding:
        """Publish the round, and wait until it ends. Raises LeaveRequested if the rank was asked
        to leave."""
        opening = self._publish(step, self._chosen(step))
        folder = f"{self._url}/{opening.name}"
        sent = SentUpdates(folder, self._num_elements, self._options.max_update_norm)
        over = self._collect(opening, sent, asks_all=True)
        assert over is not None
        self._report(replace(over, is_open=False, received=sorted(sent.clients)))
        counted = [sent.sent[client] for client in sorted(sent.accepted | sent.readable)]
        most = self._http.max_samples
        participants = [
            Participant(one.client, min(one.num_samples, most), one.num_steps) for one in counted
        ]
        plan = self._plan(step, participants, sent.clients, self._rounds.chosen(step))
        by_client = {one.client: one for one in counted}
        share = CollectedShare.of(plan, sent=by_client, folder=folder)
        return Feeding(plan.num_samples, [share])

    def _publish(self, number: int, clients: list[int] | None, nonce: str = "") -> RoundReport:
        quorum = self._options.least_updates
        return self._publisher.publish(number, clients, quorum, self._deadline_s, nonce)

    def _chosen(self, number: int) -> list[int] | None:
        """Return the clients of a round; None for all."""
        options = self._options
        asks_all = options.clients_per_round == options.clients
        return None if asks_all else self._rounds.chosen(number)

    def _collect(
        self, asking: RoundReport, answers: RoundAnswers, *, asks_all: bool
    ) -> RoundReport | None:
        """Report the round to the service, and collect responses until the round ends.

        asks_all: whether to ask all clients at the deadline and then continue to wait for a quorum.
        If False, and there is no quorum at the deadline, the method returns None.
        """
        late_at = time.monotonic() + asking.deadline_s
        self._look(answers)
        self._report(replace(asking, received=sorted(answers.accepted | answers.refused)))
        while True:
            accepted, refused, clients = answers.accepted, answers.refused, asking.clients
            asked = frozenset(range(self._options.clients) if clients is None else clients)
            is_last = clients == self._candidates or not asks_all
            is_late = time.monotonic() >= late_at
            state = Collection(asked, is_last, asking.quorum, accepted, refused)
            match next_of(state, is_late=is_late):
                case Next.END:
                    return asking
                case Next.ASK_ALL:
                    asking = replace(asking, clients=self._candidates)
                    self._report(replace(asking, received=sorted(accepted | refused)))
                case Next.WAIT:
                    if is_late and not asks_all:
                        return None
                    self._pause()
            self._look(answers)

    def _pause(self) -> None:
        """Wait before the next check. Raises LeaveRequested if the rank was asked to leave."""
        if self._page.is_asked_to_leave:
            raise LeaveRequested
        self._page.move()  # clients might take hours
        time.sleep(self._look_s)

    def _look(self, answers: RoundAnswers) -> None:
        """Check for answers. Raises StorageError only if the storage has not responded for
        `storage_faults.WAIT_S` seconds, because a round can take hours, and the storage may fail
        briefly during this time."""
        try:
            answers.look(self._page.move)
        except StorageError as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                log(f"can't read the updates of the round; retrying: {error}")
            elif time.monotonic() - self._failing_since > storage_faults.WAIT_S:
                raise
        else:
            self._failing_since = None

    def _report(self, report: RoundReport | RoundTroubleReport) -> None:
        train.emit(report.KIND, report.body())

    def _plan(
        self,
        number: int,
        participants: Sequence[Participant],
        came: Set[int],
        chosen: Sequence[int],
    ) -> RoundPlan:
        lost = [client for client in chosen if client not in came]
        gone = dict.fromkeys(lost, MaskingPhase.MASKED_INPUT)
        return RoundPlan(number, participants, len(chosen), 0, gone)
