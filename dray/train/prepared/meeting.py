"""The first exchange of a new group: the standings of all ranks determine which ranks lack a result
or the state, and which rank hands over what they lack. Every rank draws the same conclusions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dray.train.prepared.batch_state import NO_STATE
from dray.train.prepared.group import Group, everyones


class RankStanding(NamedTuple):
    """The state of one rank when it joins a group."""

    ops: int
    """Number of operations whose results the rank has; NO_STATE if it has no state."""
    is_whole: bool
    """Whether another process can continue from the rank's anchor."""
    is_moved: bool
    """Whether the rank divided its batch differently than it will in the group."""
    anchor_ops: int
    """Number of operations before the rank's anchor."""
    in_batch: bool
    """Whether the rank is in an operation of a batch."""


class Meeting:
    """The standings of all ranks, ordered by rank."""

    def __init__(self, standings: Sequence[RankStanding]) -> None:
        self._standings = standings
        self.newest = max(each.ops for each in standings)
        """Number of operations that some rank has completed; NO_STATE if no rank has a state."""

    @property
    def behind(self) -> list[int]:
        """The ranks that lack the result of the newest operation."""
        return [at for at, each in enumerate(self._standings) if NO_STATE < each.ops < self.newest]

    @property
    def with_newest(self) -> int:
        """The first rank that has the result of the newest operation."""
        return next(at for at, each in enumerate(self._standings) if each.ops == self.newest)

    @property
    def restarts_at(self) -> int | None:
        """If a batch must start again because the group divides it differently, the number of
        operations before this batch; None if no batch must start again, for example because a rank
        has completed the batch's exchange."""
        if not any(each.is_moved for each in self._standings):
            return None
        newest = (each for each in self._standings if each.ops == self.newest)
        return next((each.anchor_ops for each in newest if each.in_batch), None)

    @property
    def lacks_state(self) -> bool:
        """Whether a rank has no state."""
        return any(each.ops == NO_STATE for each in self._standings)

    @property
    def source(self) -> tuple[int, RankStanding] | None:
        """The rank that hands over its state, and its standing; None if no rank can."""
        holders = [(at, each) for at, each in enumerate(self._standings) if each.is_whole]
        return max(holders, key=lambda holder: holder[1].ops, default=None)


def meet(group: Group, mine: RankStanding, device: torch.device) -> Meeting:
    """Exchange the standings. A collective."""
    table = everyones(group, [int(each) for each in mine], device)
    return Meeting([RankStanding(o, bool(w), bool(m), a, bool(b)) for o, w, m, a, b in table])
