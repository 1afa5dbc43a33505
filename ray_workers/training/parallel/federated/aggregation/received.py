"""The data that all ranks exchange about the updates of a round: verdicts, norms and losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dray.spec.federated.parts import Silo
from ray_workers.shared.job_log import log
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.federated.aggregation.update_checks import (
    Reported,
    Verdict,
    mean,
    reason,
    trusted,
)
from ray_workers.training.parallel.federated.rounds import RoundPlan

MAX_NAMED = 20
"""Maximum number of clients per round whose refused updates are logged individually."""


class UpdateTable:
    """A table with one row per participant of a round, filled in by the rank that simulates the
    participant."""

    def __init__(self, plan: RoundPlan, device: torch.device) -> None:
        self._plan = plan
        self._lines = torch.zeros(len(plan.participants), 3, dtype=torch.float64, device=device)

    def note(self, index: int, verdict: Verdict, norm: float, loss: float) -> None:
        self._lines[index] = self._lines.new_tensor([verdict, norm, loss])

    def of_all(self, world_size: int) -> ReceivedUpdates:
        """Gather the rows of all ranks by summing their tables. The sums are exact, because each
        row is nonzero on at most one rank. A collective."""
        process_group.add_up(self._lines, world_size)
        verdicts, norms, losses = self._lines.t().tolist()
        return ReceivedUpdates(self._plan, [Verdict(int(one)) for one in verdicts], norms, losses)


@dataclass(frozen=True)
class ReceivedUpdates:
    """The updates of a round, keyed by the index of their client among the participants."""

    plan: RoundPlan
    verdicts: Sequence[Verdict]
    norms: Sequence[float]
    """Norms before clipping; NaN for updates without a norm, and with secure aggregation."""
    losses: Sequence[float]
    """The mean loss of each client during its training; NaN if it is hidden."""

    @property
    def accepted(self) -> list[int]:
        """The indices of the accepted updates."""
        return [at for at, each in enumerate(self.verdicts) if each is Verdict.ACCEPTED]

    def loss(self, last: float) -> float:
        """Return the mean loss over the samples of accepted clients whose losses are `trusted`.
        Returns NaN if all updates were refused, and `last` if there were no updates or no client
        reported a loss."""
        if not self.plan.participants:
            return last
        if not (accepted := self.accepted):
            return math.nan
        participants = self.plan.participants
        losses = trusted(
            Reported(self.losses[at], participants[at].num_samples)
            for at in accepted
            if participants[at].reports_loss
        )
        return last if (found := mean(losses)) is None else found

    def metrics(self, *, counts: bool) -> dict[str, float]:
        """Return the metrics of the round. counts: whether enough updates arrived for the round to
        count."""
        accepted, plan = self.accepted, self.plan
        found: dict[str, float] = {
            "federated/updates": len(accepted) if counts else 0,
            "federated/dropped_out": len(plan.lost),
            "federated/stragglers": plan.num_stragglers,
            "federated/refused": len(plan.participants) - len(accepted),
        }
        norms = [self.norms[at] for at in accepted if math.isfinite(self.norms[at])]
        if norms:
            found["federated/update_norm"] = statistics.median(norms)
        return found

    def name_refused(self, max_norm: float, silos: Sequence[Silo] | None = None) -> None:
        """Log the refused updates. silos: the clients, if they have names."""
        refused = [at for at, each in enumerate(self.verdicts) if each is not Verdict.ACCEPTED]
        for at in refused[:MAX_NAMED]:
            client = self.plan.participants[at].client
            who = f"client {client}" if silos is None else f"silo {silos[client].name}"
            why = reason(self.verdicts[at], self.norms[at], max_norm)
            log(f"round {self.plan.number}: the update of {who} is refused: {why}")
        if len(refused) > MAX_NAMED:
            more = len(refused) - MAX_NAMED
            log(f"round {self.plan.number}: the updates of {more} more clients are refused")
