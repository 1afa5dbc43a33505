"""The order in which jobs are considered, those that wait and those that run.

Jobs within their queue's quota come first, and last those of a queue that has used more than its
share (`shares`). Within each, higher priority comes first. Among equals, jobs of users that have
used more than their share come last. Of the rest the job with the least work left comes first,
which keeps the average completion time low: a job's own progress tells how long it has left, and
the runs of earlier jobs like it tell what its progress does not yet. The order of submission
decides what is left. A job that was moved to the front of its queue and priority takes the place of
the first of those that it passes there, with that one's standing towards other queues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from service.domain.scheduling.rules.shares import Turn

SETTLING_S = 300.0
"""Added to the time that a job has left: differences far below what a start costs mean nothing."""
LONGEST_WAIT_S = 24 * 3600.0
"""After which a job comes before its equals, is not pushed out by them, and lets nobody pass on
what it has reserved. Until then jobs that yield pass: they go when they are in its way, and
capacity that is kept empty delays everybody."""


class Rank(NamedTuple):
    """Comes before others that are greater."""

    turn: Turn
    falling_priority: int
    """The priority, times -1."""
    user_is_ahead: bool
    work: float
    """Work left: seconds, times the share of the cluster to the power of `gangs.SIZE_POWER`."""
    seq: int
    place: int
    """Lower of those that were moved to the front: see `Fronts`."""

    @property
    def priority(self) -> int:
        return -self.falling_priority

    def may_less(self, other: Rank) -> bool:
        """Whether it surely may have nobody leave whom the other may not. Ranks of different turns
        are not compared: a priority counts among jobs of one turn only."""
        return (
            self.turn == other.turn
            and self.falling_priority >= other.falling_priority
            and self.user_is_ahead >= other.user_is_ahead
            and self.work >= other.work
        )


class Fronts:
    """The queues and priorities in which jobs were moved to the front."""

    def __init__(self, waiting: Iterable[tuple[str, Rank]]) -> None:
        """waiting: queue and rank of those that could start."""
        self._first: defaultdict[tuple[str, Turn, int], dict[int, Rank]] = defaultdict(dict)
        """The first rank of each place, by queue, turn and priority."""
        for queue, rank in waiting:
            of_place = self._first[queue, rank.turn, rank.falling_priority]
            of_place[rank.place] = min(rank, of_place.get(rank.place, rank))

    def rank(self, queue: str, own: Rank) -> Rank:
        """The rank of a job just before the first of those that it passes."""
        of_place = self._first.get((queue, own.turn, own.falling_priority), {})
        passed = [rank for place, rank in of_place.items() if place > own.place]
        return min([own, *passed])._replace(place=own.place)


def work_left(left_s: float | None, weight: float, waited_s: float) -> float:
    """left_s: seconds that the job has left on its slots, None where nobody knows: it is tried
    first, and its progress will tell. One that has waited for long enough comes before all.
    weight: its share of the cluster to the power of `gangs.SIZE_POWER`."""
    if waited_s > LONGEST_WAIT_S:
        return -1.0
    return 0.0 if left_s is None else (left_s + SETTLING_S) * weight
