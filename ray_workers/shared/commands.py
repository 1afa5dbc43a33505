"""Commands to a living attempt, which the service sends and the supervisor carries out.

A command whose answer was lost is sent again, so each is harmless to repeat: two commands of one
attempt with the same `name` are one command, and the supervisor carries it out once.
"""

from __future__ import annotations

from dataclasses import dataclass

from dray.drills import DrillKind
from ray_workers.shared.contracts import Slice


@dataclass(frozen=True)
class Stop:
    """End: the job is being cancelled."""

    name = "stop"


@dataclass(frozen=True)
class Leave:
    """Save a checkpoint and leave the slots."""

    grace_s: float
    """Seconds for both."""
    name = "leave"


@dataclass(frozen=True)
class Drill:
    """Inject a fault on purpose. DRILL frames report how it goes."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None
    """Inject the fault when this many optimizer steps are done; None is at once."""

    @property
    def name(self) -> str:
        return f"drill {self.id}"


@dataclass(frozen=True)
class Grant:
    """Take more slots, which are the attempt's from the grant on. A RESIZED frame reports the slots
    that it holds then, also if it could not take them."""

    number: int
    """1, 2, 3 ... within the attempt."""
    slices: tuple[Slice, ...]
    """None where only the batch changes."""
    batch_size: int | None
    """Global batch from the round on in which the slots are taken in; None: as before."""

    @property
    def name(self) -> str:
        return f"grow {self.number}"


@dataclass(frozen=True)
class Recall:
    """Give slots back and go on without them; they are the attempt's until it has. A RESIZED frame
    reports the slots that it holds then, also if it could not give them back."""

    number: int
    """Of the same sequence as those of grants."""
    slices: tuple[Slice, ...]
    batch_size: int | None
    """Global batch from the round on in which they are given back; None: as before."""

    @property
    def name(self) -> str:
        return f"recall {self.number}"


Command = Stop | Leave | Drill | Grant | Recall
