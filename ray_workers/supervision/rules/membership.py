"""Determines the members of a group's next rendezvous round. The module is pure, and imports
neither Ray nor torch.

Lost workers, dead nodes, granted slots and recalled slots all change the roster of a group.
`next_round` returns the round that results from a roster, and the actions that are needed before
the round can begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.mesh_shape import MeshPosition
from ray_workers.supervision.rules.mesh_positions import Seated, arranged


class WorkerState(Enum):
    """The state of a worker, as observed by the supervisor."""

    ACTIVE = auto()
    """The worker has a rank in the group, and its process is running."""
    ENDED = auto()
    """The worker has a rank, but its process has exited, and the supervisor has not decided yet
    whether to replace the process."""
    LOST = auto()
    """The worker has a rank, but its process has exited and will be replaced."""
    STARTING = auto()
    """The worker has no rank yet, because its process is being started while the other workers
    train."""
    READY = auto()
    """The worker has no rank yet, and its process is waiting for a rank."""
    SPARE = auto()
    """The worker is a spare whose process is waiting for a rank. It gets one only if another worker
    loses its rank."""


ACTIVE = WorkerState.ACTIVE


@dataclass(frozen=True)
class Worker:
    index: int
    rank: int
    """The worker's rank in the current round, or its last rank."""
    node_id: str
    state: WorkerState
    position: MeshPosition | None = None
    """The worker's position in the latest round that was announced to its process; None if the
    process has not been in a round, or left over from the latest round."""
    since: int = 0
    """The announced round in which the worker's process got its rank."""


@dataclass(frozen=True)
class GroupRoster:
    """The workers of a group at one point in time."""

    workers: Sequence[Worker]
    least: int
    """Minimum number of workers that the group needs to train."""
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
    """Workers that join a later round, because their processes are replaced while the other workers
    train."""
    num_awaited: int
    """Number of missing workers. The members wait for these workers before the round begins."""
    idle: tuple[int, ...] = field(kw_only=True, default=())
    """Workers that are kept without a rank, because they do not complete a replica of a divided
    model."""
    is_whole: bool
    """Whether no worker is missing and no member's process has exited. If false, the round is not
    announced until all exited members have been replaced or abandoned."""
    takeovers: tuple[tuple[int, int], ...] = ()
    """(spare, lost worker) for each spare that takes the rank of another worker. If the other
    worker keeps its slot, it becomes a spare, and its process is replaced while the others
    train."""


def next_round(roster: GroupRoster, traits: GroupTraits) -> NextRound | str:
    """Return the round that results from the roster, or the reason why the group can't continue."""
    left = [one for one in roster.workers if one.node_id not in roster.dead_nodes]
    if len(left) < len(roster.workers) and traits.keeps_numbers:
        return (
            "a node is lost, and removing its ranks would change the numbers and roles of the "
            "other ranks"
        )
    stays = [one for one in left if one.index not in roster.leaving]
    takeovers = _takeovers(roster, stays)
    replaced = {lost.index for _, lost in takeovers}
    stays = [one for one in stays if one.index not in replaced]
    stays += [replace(spare, rank=lost.rank, state=ACTIVE) for spare, lost in takeovers]
    lost = [one for one in stays if one.state is WorkerState.LOST]
    waits_for_lost = not traits.goes_on_without_lost
    without = {WorkerState.STARTING, WorkerState.SPARE}
    without |= set() if waits_for_lost else {WorkerState.LOST}
    members = [
        one
        for one in sorted(stays, key=lambda one: (one.state is WorkerState.READY, one.rank))
        if one.state not in without
    ]
    num_ended = sum(one.state is WorkerState.ENDED for one in members)
    if num_ended == len(members):
        return "there are no ranks left"
    num_awaited = max(0, roster.least - len(members)) if waits_for_lost else 0
    if num_awaited and traits.is_tied_to_nodes:
        return "a node was lost, and no other node holds the data of its ranks"
    indices, idle = _indices(members), _indices(())
    if traits.mesh.num_parts > 1 and not num_awaited:
        known = (WorkerState.ACTIVE, WorkerState.ENDED)
        seated = [
            Seated(one.index, one.position if one.state in known else None, one.since)
            for one in members
        ]
        indices, idle = arranged(seated, traits.mesh)
    return NextRound(
        members=indices,
        restarted=_indices(lost if waits_for_lost else ()),
        rejoining=_indices(() if waits_for_lost else lost),
        idle=idle,
        num_awaited=num_awaited,
        is_whole=not num_awaited and not num_ended,
        takeovers=tuple((spare.index, lost.index) for spare, lost in takeovers),
    )


def _takeovers(roster: GroupRoster, stays: Sequence[Worker]) -> list[tuple[Worker, Worker]]:
    """Return the spares that take a rank, each paired with the worker that loses this rank. The
    worker loses the rank because its process has exited, its node is dead, or its slot has been
    recalled. Spares are never used for growth."""
    spares = [one for one in stays if one.state is WorkerState.SPARE]
    remaining = {one.index for one in stays}
    vacated = [
        one
        for one in sorted(roster.workers, key=lambda one: one.rank)
        if one.state is WorkerState.LOST
        or (one.index not in remaining and one.state in (ACTIVE, WorkerState.ENDED))
    ]
    return list(zip(spares, vacated, strict=False))


def _indices(workers: Iterable[Worker]) -> tuple[int, ...]:
    return tuple(one.index for one in workers)
