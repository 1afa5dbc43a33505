"""When a round ends whose clients are outside of the cluster: pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto


class Next(Enum):
    """The next thing to be done about an open round."""

    WAIT = auto()
    ASK_ALL = auto()
    """Open the round to all clients: those that were asked do not make a quorum in time."""
    END = auto()


@dataclass(frozen=True)
class Collection:
    """An open round, and what has come in."""

    asked: Set[int]
    """Clients that are asked for an update."""
    asks_all: bool
    """Whether these are all clients of the job."""
    quorum: int
    accepted: Set[int]
    """Clients whose updates count."""
    refused: Set[int]
    """Clients whose updates do not: they can't send another one in the round."""


def next_of(collection: Collection, *, is_late: bool) -> Next:
    """is_late: the deadline is over.

    A round ends once nobody is left to wait for, or at its deadline with a quorum. Without one it
    goes on after that, and the update that makes the quorum ends it: a night in which no client is
    there costs no round.
    """
    is_enough = len(collection.accepted) >= collection.quorum
    all_came = collection.asked <= collection.accepted | collection.refused
    if is_enough and (is_late or all_came):
        return Next.END
    if collection.asks_all:
        return Next.END if all_came else Next.WAIT
    return Next.ASK_ALL if is_late or all_came else Next.WAIT
