"""Decides which clients take part in a round, how many steps each takes, which rank simulates it,
and when a round with clients outside of the cluster ends.

Everything is a function of the document, the round and the sizes of the clients' data sets, so a
repeated round is identical, on any number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np

from dray.secure_aggregation.messages import MaskingPhase
from dray.spec import Federated
from ray_workers.training.data.sampler import derive_seed

PHASES = tuple(phase for phase in MaskingPhase if phase is not MaskingPhase.ENDED)
AFTER_THE_UPDATE = (MaskingPhase.CONSISTENCY_CHECK, MaskingPhase.UNMASK)


@dataclass(frozen=True)
class Participant:
    """A client that sends an update in a round."""

    client: int
    num_samples: int
    """Number of the client's training samples."""
    num_steps: int
    """Number of the client's local steps in the round."""
    attacks: bool = False
    """Whether the client sends a poisoned update."""
    lost_in: MaskingPhase | None = None
    """With secure aggregation: the first phase after its update in which the client doesn't
    respond; None if it responds in all phases."""
    reports_loss: bool = True
    """Whether the client sends its mean loss with the update."""


@dataclass(frozen=True)
class RoundPlan:
    """The clients of one round."""

    number: int
    """Number of the round, from 1."""
    participants: Sequence[Participant]
    """Sorted by client."""
    num_chosen: int
    num_stragglers: int
    lost: Mapping[int, MaskingPhase]
    """Clients that send no update: drop-outs, and stragglers for which the round doesn't wait. With
    secure aggregation, the value is the first phase in which the client doesn't respond."""

    @cached_property
    def num_samples(self) -> int:
        """Total number of samples of all participants."""
        return sum(one.num_samples for one in self.participants)


class Rounds:
    """The rounds of a job."""

    def __init__(self, options: Federated, sizes: Sequence[int], seed: int) -> None:
        """sizes: the number of training samples of each client."""
        self._options = options
        self._sizes = sizes
        self._seed = seed
        self._attackers: frozenset[int] = frozenset()
        if options.attack is not None:
            count = max(1, round(options.attack.rate * options.clients))
            drawn = self._generator("attackers", 0).permutation(options.clients)
            self._attackers = frozenset(drawn[:count].tolist())

    def plan(self, number: int) -> RoundPlan:
        options = self._options
        chosen = self.chosen(number)
        fate = self._generator("fate", number).random((3, options.clients))
        participants, num_stragglers = [], 0
        lost: dict[int, MaskingPhase] = {}
        for client in chosen:
            is_gone, straggles, part = fate[:, client]
            lost_in: MaskingPhase | None = None
            if is_gone < options.dropout_rate:
                lost_in = PHASES[int(len(PHASES) * is_gone / options.dropout_rate)]
                if options.secure_aggregation is None or lost_in not in AFTER_THE_UPDATE:
                    lost[client] = lost_in
                    continue
            num_steps = options.steps_of(self._sizes[client])
            stragglers = options.stragglers
            # A client with a single step can't be a straggler, because stragglers perform only some
            # of their steps.
            if stragglers is not None and straggles < stragglers.rate and num_steps > 1:
                num_stragglers += 1
                if stragglers.updates == "drop":
                    lost[client] = MaskingPhase.MASKED_INPUT
                    continue
                num_steps = 1 + int(part * (num_steps - 1))
            size, attacks = self._sizes[client], client in self._attackers
            participants.append(Participant(client, size, num_steps, attacks, lost_in))
        return RoundPlan(number, participants, len(chosen), num_stragglers, lost)

    def chosen_of(self, eligible: Sequence[int], number: int, again: int) -> list[int]:
        """Choose the clients of a round from the `eligible` clients. `again` counts the repetitions
        of the round. A repeated round uses different clients, if there are any."""
        count = min(self._options.clients_per_round, len(eligible))
        generator = self._generator(f"chosen again {again}", number)
        drawn = generator.choice(len(eligible), count, replace=False)
        return sorted(eligible[index] for index in drawn)

    def chosen(self, number: int) -> list[int]:
        """Return the chosen clients of a round, sorted. With privacy, each client is drawn
        independently (Poisson sampling), as the accountant assumes."""
        options = self._options
        generator = self._generator("chosen", number)
        if options.privacy is not None:
            rate = options.clients_per_round / options.clients
            return np.flatnonzero(generator.random(options.clients) < rate).tolist()
        drawn = generator.choice(options.clients, options.clients_per_round, replace=False)
        return sorted(drawn.tolist())

    def _generator(self, name: str, number: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(name, self._seed, number))


def assign(participants: Sequence[Participant], num_ranks: int) -> list[int]:
    """Return the rank that simulates each participant. Participants with the most steps are
    assigned first, each to the rank with the fewest steps so far."""
    ranks = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(participants)
    for index in sorted(range(len(owners)), key=lambda at: (-participants[at].num_steps, at)):
        num_steps, rank = heapq.heappop(ranks)
        owners[index] = rank
        heapq.heappush(ranks, (num_steps + participants[index].num_steps, rank))
    return owners


class Next(Enum):
    """The next action to take for an open round."""

    WAIT = auto()
    ASK_ALL = auto()
    """Open the round to all clients, because too few of the clients asked so far responded in
    time."""
    END = auto()


@dataclass(frozen=True)
class Collection:
    """An open round, and the updates received so far."""

    asked: Set[int]
    """Clients that were asked for an update."""
    asks_all: bool
    """Whether all clients of the job were asked for an update."""
    quorum: int
    accepted: Set[int]
    """Clients whose updates count."""
    refused: Set[int]
    """Clients whose updates don't count, and who can't send another update in this round."""


def next_of(collection: Collection, *, is_late: bool) -> Next:
    """Return the next action for an open round. is_late: whether the deadline has passed.

    A round ends when all updates have arrived, or at its deadline if there is a quorum. Without a
    quorum, the round continues after the deadline and ends with the update that completes the
    quorum, so that no round is lost if, for example, all clients are switched off during the night.
    """
    is_enough = len(collection.accepted) >= collection.quorum
    all_came = collection.asked <= collection.accepted | collection.refused
    if is_enough and (is_late or all_came):
        return Next.END
    if collection.asks_all:
        return Next.END if all_came else Next.WAIT
    return Next.ASK_ALL if is_late or all_came else Next.WAIT
