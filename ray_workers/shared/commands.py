"""Commands that the service sends to a running attempt, and its supervisor carries out.

The service sends a command again if the answer was lost, so commands are idempotent: the supervisor
ignores a drill whose id it knows, a grant or recall with a number it has seen, and a further stop.
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
    """Seconds for saving and leaving together."""
    name = "leave"


@dataclass(frozen=True)
class Drill:
    """Inject a fault on purpose. DRILL frames report how it goes."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None
    """Inject the fault after this many optimizer steps; None injects it at once."""

    @property
    def name(self) -> str:
        return f"drill {self.id}"


@dataclass(frozen=True)
class Grant:
    """Take more slots. They belong to the attempt from the grant on. A RESIZED frame reports the
    slots that the attempt then holds, also if it could not take the new ones."""

    number: int
    """1, 2, 3 ... within the attempt."""
    slices: tuple[Slice, ...]
    """Empty if only the batch changes."""
    batch_size: int | None
    """Global batch from the round on that adds the slots; None keeps the batch."""

    @property
    def name(self) -> str:
        return f"grow {self.number}"


@dataclass(frozen=True)
class Recall:
    """Release slots, which belong to the attempt until then, and train on without them. A RESIZED
    frame reports the slots that the attempt then holds, also if it could not release these."""

    number: int
    """Grants and recalls share one sequence of numbers."""
    slices: tuple[Slice, ...]
    batch_size: int | None
    """Global batch from the round on that releases the slots; None keeps the batch."""

    @property
    def name(self) -> str:
        return f"recall {self.number}"


Command = Stop | Leave | Drill | Grant | Recall
