"""Runs a round: combines the clients' updates into one step of the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_workers.training.parallel.federated.aggregation.aggregators import (
    FixedPointSum,
    robust,
    rows_of_all,
)
from ray_workers.training.parallel.federated.aggregation.algorithms import ALGORITHMS
from ray_workers.training.parallel.federated.aggregation.privacy import (
    Accountant,
    ClippingNorm,
    check_statistics,
)
from ray_workers.training.parallel.federated.aggregation.received import (
    ReceivedUpdates,
    UpdateTable,
)
from ray_workers.training.parallel.federated.aggregation.update_checks import Verdict, judged
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.client_training import Flat, client_lr
from ray_workers.training.parallel.federated.masking_values import SecureSum
from ray_workers.training.parallel.federated.rounds import Participant
from ray_workers.training.parallel.gradients import GradientEngine, Pass
from ray_workers.training.parallel.strategy import StrategyContext


class JudgedUpdate(NamedTuple):
    """The update of a client, on the rank that simulates the client."""

    position: int
    """Index of the client in the list of participants."""
    participant: Participant
    update: Tensor
    loss: float
    verdict: Verdict
    norm: float
    """NaN if the update has no norm."""


@dataclass(frozen=True)
class RoundResult:
    """The combined updates of a round."""

    mean: Tensor | None
    """The combined update, float64 (elements,); None if there were too few updates."""
    loss: float
    num_within: int
    """Number of updates that did not have to be clipped for privacy."""
    rows: Tensor | None = None
    """The individual updates, (participants, elements); None if the round needs only their sum."""


@dataclass(frozen=True)
class RoundEnd:
    """The changes that a round makes to everything but the weights."""

    counts: bool
    """Whether enough updates arrived. If too few updates arrived, the round changes nothing."""
    buffers: Sequence[Tensor]
    """The changes to the model's buffers."""
    integers: Tensor | None
    """The values of the model's integer buffers (see `Flat.integer_values`); None if unchanged."""
    loss: float
    metrics: Mapping[str, float]
    findings: Any
    """The result of `Algorithm.aggregate`; None if the round doesn't count."""
    clip_norm: float | None
    """The clipping norm for the next round."""


class FederatedEngine(GradientEngine):
    """Runs a round in the `backward` of a step. The gradient is the negated update of the round.

    No persistent state changes before the server's step, so an interrupted round can be repeated.
    """

    uses_ddp = False

    def __init__(self, given: StrategyContext) -> None:
        parts = given.engine_parts()
        super().__init__(parts)
        assert given.spec.federated is not None
        self._given = given
        self._train = given.spec.train
        self._options = options = given.spec.federated
        self.rank = 0
        self._flat = Flat(parts.model, has_buffers=options.privacy is None)
        self.algorithm = ALGORITHMS[options.algorithm](options, self._flat, given.device)
        self._clipping: ClippingNorm | None = None
        self._accountant: Accountant | None = None
        if options.privacy is not None:
            check_statistics(parts.model)
            self._clipping = ClippingNorm(options, options.privacy, self._train.seed)
            self._accountant = Accountant(options, options.privacy)
        self._last_loss = 0.0
        self._end: RoundEnd | None = None

    @property
    def num_update_elements(self) -> int:
        return self._flat.num_elements

    def disband(self) -> None:
        self._end = None
        super().disband()

    def backward(self, work: Pass) -> None:
        """Run a round. `prepare` is called before each client trains, with its index among the
        participants."""
        mine = work.share
        assert isinstance(mine, RoundShare)
        size = self._flat.num_elements
        added = FixedPointSum(size, self._options.max_update_norm, self._given.device)
        table = UpdateTable(mine.plan, self._given.device)
        kept: list[Tensor] = []
        for each in self._updates(mine, work.prepare):
            update, verdict = each.update, each.verdict
            if self._needs_each:
                has_shape = verdict is not Verdict.WRONG_SHAPE
                kept.append(update if has_shape else torch.zeros(size, device=update.device))
            elif verdict is Verdict.ACCEPTED:
                if self._clipping is not None:
                    self._clipping.clip(update, each.norm)
                added.add(update, self._weight(each.participant, mine))
            table.note(each.position, verdict, each.norm, each.loss)
        work.before_exchange()
        received = table.of_all(self._world_size)
        if self._needs_each:
            rows = rows_of_all(kept, mine.owners, torch.empty(size, device=self._given.device))
            result = self._of_each(received, rows)
        else:
            result = self._result(received, self._mean(received, added.total(self._world_size)))
        self._take(mine, received, result, self._integers(mine, received))

    def _integers(self, mine: RoundShare, received: ReceivedUpdates) -> Tensor | None:
        """Return the model's integer buffers after the round; None if unchanged. Clients with their
        own data can train only dray's built-in models, whose integer buffers never change."""
        return None

    def _updates(self, mine: RoundShare, prepare: Callable[[int], None]) -> Iterator[JudgedUpdate]:
        """Yield the updates of this rank's clients."""
        size, max_norm = self._flat.num_elements, self._options.max_update_norm
        for position, participant in mine.own(self.rank):
            prepare(position)
            update, loss = self._update_of(participant, mine)
            verdict, norm = judged(update, size, max_norm)
            yield JudgedUpdate(position, participant, update, loss, verdict, norm)

    def _update_of(self, participant: Participant, mine: RoundShare) -> tuple[Tensor, float]:
        """Return a client's update and its mean loss."""
        raise NotImplementedError

    def _lr(self, round_number: int) -> float:
        """Return the clients' learning rate."""
        return client_lr(self._train, round_number, self._given.calendar.total_steps)

    @property
    def _needs_each(self) -> bool:
        """Whether a round needs the individual updates in addition to their mean."""
        return self.algorithm.needs_each or self._options.aggregator.name != "mean"

    def _weight(self, participant: Participant, mine: RoundShare) -> float:
        """Return the participant's weight. The weights of all participants sum to 1."""
        if self._clipping is not None:
            return 1 / len(mine.plan.participants)
        return participant.num_samples / mine.plan.num_samples

    def _mean(self, received: ReceivedUpdates, total: Tensor) -> Tensor | None:
        """Return the mean, given the weighted sum of the accepted updates; None if no updates were
        accepted."""
        plan = received.plan
        if self._clipping is not None:
            return self._private_mean(plan.number, total * len(plan.participants))
        accepted = sum(plan.participants[at].num_samples for at in received.accepted)
        return total * (plan.num_samples / accepted) if accepted else None

    def _private_mean(self, round_number: int, total: Tensor) -> Tensor:
        """Return the mean with noise, given the sum of the clipped updates."""
        assert self._clipping is not None
        noise = self._clipping.noise(round_number, len(total)).to(total)
        # Divide by the expected number of clients, because the actual number would also reveal
        # information.
        return (total + noise) / self._options.clients_per_round

    def _of_each(self, received: ReceivedUpdates, rows: Tensor) -> RoundResult:
        accepted = received.accepted
        mean = None
        if len(accepted) >= self._options.least_updates:
            mean = robust(self._options.aggregator, rows[accepted])
        return self._result(received, mean, rows)

    def _result(
        self, received: ReceivedUpdates, mean: Tensor | None, rows: Tensor | None = None
    ) -> RoundResult:
        """Return the result of a round whose individual updates are known."""
        num_within = 0
        if self._clipping is not None:
            norms = [received.norms[at] for at in received.accepted]
            num_within = sum(norm <= self._clipping.value for norm in norms)
        return RoundResult(mean, received.loss(self._last_loss), num_within, rows)

    def _of_sum(self, received: ReceivedUpdates, found: SecureSum | None) -> RoundResult:
        if found is None:
            all_refused = received.plan.participants and not received.accepted
            return RoundResult(None, math.nan if all_refused else self._last_loss, 0)
        total = found.updates.to(self._given.device)
        if self._clipping is None:
            mean = total / found.weight
        else:
            mean = self._private_mean(received.plan.number, total)
        return RoundResult(mean, found.loss, found.num_within)

    def _take(
        self,
        mine: RoundShare,
        received: ReceivedUpdates,
        result: RoundResult,
        integers: Tensor | None = None,
    ) -> None:
        """Set the round's update as the gradient, and keep its other changes for `commit`."""
        accepted, mean, rows = received.accepted, result.mean, result.rows
        counts = mean is not None and len(accepted) >= self._options.least_updates
        if mean is None or not counts:
            mean = torch.zeros(self._flat.num_elements, device=self._given.device)
        parameters, buffers = self._flat.split(mean.float())
        for parameter, part in zip(self._flat.parameters, parameters, strict=True):
            parameter.grad = -part
        findings, number = None, mine.plan.number
        if counts:
            sent = [mine.plan.participants[at] for at in accepted]
            of_each = None
            if self.algorithm.needs_each:
                assert rows is not None
                of_each = rows[accepted]
            findings = self.algorithm.aggregate(sent, of_each, self._lr(number))
        metrics, clip_norm = self._metrics(mine, received, counts=counts), None
        if self._clipping is not None and self._accountant is not None:
            if counts:
                clip_norm = self._clipping.after(number, result.num_within, len(accepted))
            metrics["federated/clip_norm"] = self._clipping.value
            if self.rank == 0:
                metrics["federated/epsilon"] = self._accountant.epsilon(number)
        self._end = RoundEnd(counts, buffers, integers, result.loss, metrics, findings, clip_norm)
        if self.rank == 0:
            received.name_refused(self._options.max_update_norm, self._options.silos)

    def _metrics(
        self, mine: RoundShare, received: ReceivedUpdates, *, counts: bool
    ) -> dict[str, float]:
        return received.metrics(counts=counts)

    # After a round.

    @property
    def counts(self) -> bool:
        """Whether the last round counts."""
        assert self._end is not None
        return self._end.counts

    def take_loss(self) -> Tensor:
        assert self._end is not None
        return torch.tensor(self._end.loss, device=self._given.device)

    def step_metrics(self) -> dict[str, float]:
        return dict(self._end.metrics) if self._end is not None and self.rank == 0 else {}

    @torch.no_grad()
    def change_buffers(self, rate: float) -> None:
        """Change the buffers. Called after the weights have changed, but before the buffers are
        added to the moving average (EMA). rate: factor for the changes to running means."""
        assert self._end is not None
        for buffer, change in zip(self._flat.buffers, self._end.buffers, strict=True):
            buffer.add_(change, alpha=rate)
        if self._end.integers is not None:
            self._flat.write_integers(self._end.integers)

    def commit(self) -> None:
        """Apply the round's remaining changes after the server's step has changed the weights."""
        end = self._end
        assert end is not None
        if end.findings is not None:
            self.algorithm.commit(end.findings)
        if self._clipping is not None and end.clip_norm is not None:
            self._clipping.value = end.clip_norm
        if math.isfinite(end.loss):
            self._last_loss = end.loss

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's part of a checkpoint."""
        state: dict[str, Any] = {"loss": self._last_loss, **self.algorithm.state_dict()}
        if self._clipping is not None:
            state["clip_norm"] = self._clipping.value
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_loss = state["loss"]
        if self._clipping is not None:
            self._clipping.value = state["clip_norm"]
        self.algorithm.load_state_dict(state)
