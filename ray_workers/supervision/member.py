"""The supervisor's records of the workers of a group, and of the changes to a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.slots import Slots


@dataclass
class Member:
    """A worker: its slot, the actor that holds the slot, and the current process in it."""

    index: int
    """The worker's number for the entire attempt. Numbers are never reused."""
    rank: int
    """The worker's current number in the group. The ranks of a group have no gaps."""
    local_rank: int
    node_rank: int
    slots: Slots
    bundle: int
    """Index of the worker's bundle in its placement group."""
    local_world_size: int
    actor: Any
    """The rank's actor, or a LocalRank."""
    incarnation: int = 0
    """The rendezvous round for which the process was started."""
    is_placed: bool = True
    """Whether the worker has a rank in the group. A newcomer gets a rank when it is ready."""
    is_spare: bool = False
    """Whether the worker has no rank, and gets one only if another worker loses its rank."""
    is_ready: bool = False
    """Whether the process of the spare has reached the point where it waits for a rank."""
    exit: asyncio.Future[RankExit] | None = None
    """Completes when the exit of the process is observed or the actor is lost."""

    @property
    def node_id(self) -> str:
        return self.slots.part.node_id

    @property
    def is_running(self) -> bool:
        return self.exit is not None and not self.exit.done()

    @property
    def has_vanished(self) -> bool:
        """Whether the worker's process was lost without an exit code."""
        return self.exit is not None and self.exit.done() and self.end.exit_code is None

    @property
    def end(self) -> RankExit:
        """The exit of the worker's process, with the worker's current rank."""
        assert self.exit is not None, "it never ran"
        return replace(self.exit.result(), rank=self.rank)


@dataclass(frozen=True)
class GroupChange:
    """The changes to the members of a group for its next round."""

    lost: Sequence[Member] = ()
    """Members whose processes have ended and will be replaced."""
    ready: Sequence[Member] = ()
    """New members that get a rank."""
    leaving: Sequence[Member] = ()
    """Members whose slots are released once the round has been announced to the other members."""
    dead_nodes: Set[str] = frozenset()
    how: str | None = None
    """The beginning of the message that reports the group's new size."""
