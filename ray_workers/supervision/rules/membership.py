"""The members of a group's next rendezvous round: pure, without ray or torch.

Losses, dead nodes, granted slots and recalled slots are changes of one roster. `next_round` returns
the round that follows from the roster, and what has to be done before the round can begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto

from ray_workers.shared.group_traits import GroupTraits


class WorkerState(Enum):
    """The state of one worker, as the supervisor knows it."""

    ACTIVE = auto()
    """It has a rank in the group, and its process runs."""
    ENDED = auto()
    """It has a rank. Its process has ended, and whether it is replaced is not decided yet."""
    LOST = auto()
    """It has a rank. Its process has ended, and will be replaced."""
    STARTING = auto()
    """It has no rank. A process is being started for it while the others train."""
    READY = auto()
    """It has no rank. Its process waits for one."""


@dataclass(frozen=True)
class Worker:
    seat: int
    rank: int
    """Its rank in the current round, or its last rank."""
    node_id: str
    state: WorkerState


@dataclass(frozen=True)
class GroupRoster:
    """The workers of a group at one time."""

    workers: Sequence[Worker]
    least: int
    """The fewest workers with which the group trains."""
    dead_nodes: Set[str] = frozenset()
    leaving: Set[int] = frozenset()
    """Seats of workers whose slots are recalled."""


@dataclass(frozen=True)
class NextRound:
    """The next round. Lists of workers have their seats."""

    members: tuple[int, ...]
    """The workers in the round, in the order of their ranks."""
    restarted: tuple[int, ...]
    """Members that get another process before the round begins."""
    rejoining: tuple[int, ...]
    """Workers that get another process while the others train, and join a later round."""
    num_awaited: int
    """Workers that are missing; the members wait for them before the round begins."""
    is_whole: bool
    """Whether no worker is awaited and no member has ended. The round is announced only then: a
    member that has ended is replaced or given up first."""


def next_round(roster: GroupRoster, traits: GroupTraits) -> NextRound | str:
    """The round that follows from the roster, or the reason why the group can't go on."""
    left = [one for one in roster.workers if one.node_id not in roster.dead_nodes]
    if len(left) < len(roster.workers) and traits.keeps_numbers:
        return "a node is lost, and without its ranks the others would have other numbers and roles"
    lost = [one for one in left if one.state is WorkerState.LOST]
    waits_for_lost = not traits.goes_on_without_lost
    without = {WorkerState.STARTING} if waits_for_lost else {WorkerState.STARTING, WorkerState.LOST}
    members = [
        one
        for one in sorted(left, key=lambda one: (one.state is WorkerState.READY, one.rank))
        if one.state not in without and one.seat not in roster.leaving
    ]
    num_ended = sum(one.state is WorkerState.ENDED for one in members)
    if num_ended == len(members):
        return "no rank is left"
    num_awaited = max(0, roster.least - len(members)) if waits_for_lost else 0
    if num_awaited and traits.is_tied_to_nodes:
        return "a node is lost, and no other node has the data of its ranks"
    return NextRound(
        members=_seats(members),
        restarted=_seats(lost if waits_for_lost else ()),
        rejoining=_seats(() if waits_for_lost else lost),
        num_awaited=num_awaited,
        is_whole=not num_awaited and not num_ended,
    )


def _seats(workers: Iterable[Worker]) -> tuple[int, ...]:
    return tuple(one.seat for one in workers)
