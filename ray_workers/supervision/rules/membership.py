"""Determines the members of a group's next rendezvous round. Pure, without Ray or torch.

Lost workers, dead nodes, granted slots and recalled slots are all changes to a roster. `next_round`
returns the round that results from the roster, and what must be done before it can begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto

from ray_workers.shared.group_traits import GroupTraits


class WorkerState(Enum):
    """The state of a worker, as known to the supervisor."""

    ACTIVE = auto()
    """It has a rank in the group, and its process is running."""
    ENDED = auto()
    """It has a rank. Its process has ended, and it is not decided yet whether to replace it."""
    LOST = auto()
    """It has a rank. Its process has ended, and will be replaced."""
    STARTING = auto()
    """It has no rank. Its process is being started while the others train."""
    READY = auto()
    """It has no rank. Its process is waiting for one."""


@dataclass(frozen=True)
class Worker:
    index: int
    rank: int
    """The worker's rank in the current round, or its last rank."""
    node_id: str
    state: WorkerState


@dataclass(frozen=True)
class GroupRoster:
    """The workers of a group at one point in time."""

    workers: Sequence[Worker]
    least: int
    """Minimum number of workers with which the group trains."""
    dead_nodes: Set[str] = frozenset()
    leaving: Set[int] = frozenset()
    """Indices of workers whose slots have been recalled."""


@dataclass(frozen=True)
class NextRound:
    """The next round. Workers are identified by their indices."""

    members: tuple[int, ...]
    """The workers in the round, in rank order."""
    restarted: tuple[int, ...]
    """Members whose processes must be replaced before the round begins."""
    rejoining: tuple[int, ...]
    """Workers whose processes are replaced while the others train, and that join a later round."""
    num_awaited: int
    """Number of missing workers for which the members wait before the round begins."""
    is_whole: bool
    """Whether no worker is missing and no member has ended. Only then is the round announced: a
    member that has ended is first replaced or given up."""


def next_round(roster: GroupRoster, traits: GroupTraits) -> NextRound | str:
    """Return the round that results from the roster, or the reason why the group can't continue."""
    left = [one for one in roster.workers if one.node_id not in roster.dead_nodes]
    if len(left) < len(roster.workers) and traits.keeps_numbers:
        return (
            "a node is lost, and without its ranks the numbers and roles of the others would change"
        )
    lost = [one for one in left if one.state is WorkerState.LOST]
    waits_for_lost = not traits.goes_on_without_lost
    without = {WorkerState.STARTING} if waits_for_lost else {WorkerState.STARTING, WorkerState.LOST}
    members = [
        one
        for one in sorted(left, key=lambda one: (one.state is WorkerState.READY, one.rank))
        if one.state not in without and one.index not in roster.leaving
    ]
    num_ended = sum(one.state is WorkerState.ENDED for one in members)
    if num_ended == len(members):
        return "there are no ranks left"
    num_awaited = max(0, roster.least - len(members)) if waits_for_lost else 0
    if num_awaited and traits.is_tied_to_nodes:
        return "a node is lost, and no other node has the data of its ranks"
    return NextRound(
        members=_indices(members),
        restarted=_indices(lost if waits_for_lost else ()),
        rejoining=_indices(() if waits_for_lost else lost),
        num_awaited=num_awaited,
        is_whole=not num_awaited and not num_ended,
    )


def _indices(workers: Iterable[Worker]) -> tuple[int, ...]:
    return tuple(one.index for one in workers)
