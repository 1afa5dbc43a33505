"""Commands that the service sends to the supervisor of a running attempt.

If the response to a command is lost, the service sends the command again. Commands are therefore
idempotent: the supervisor ignores every drill whose id it has already received, every grant, recall
or limit whose number it has already received, and every stop after the first.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dray.drills import DrillKind
from ray_workers.shared.slices import Slice

CORRUPT_SIGNAL = signal.SIGUSR1
"""The signal by which a drill makes a rank flip a bit of its own state."""


@dataclass(frozen=True)
class Stop:
    """End the attempt, because the job is being cancelled."""

    name = "stop"


@dataclass(frozen=True)
class Leave:
    """Save a checkpoint and release the slots."""

    grace_s: float
    """Total time limit, in seconds, for saving the checkpoint and releasing the slots."""
    name = "leave"


@dataclass(frozen=True)
class Drill:
    """Inject a fault intentionally. DRILL frames report the progress."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None
    """Inject the fault after this many optimizer steps; None injects it immediately."""

    @property
    def name(self) -> str:
        return f"drill {self.id}"


@dataclass(frozen=True)
class Grant:
    """Take more slots. The slots belong to the attempt from the moment of the grant. A RESIZED
    frame reports the slots that the attempt holds afterwards, even if it could not take the new
    slots."""

    number: int
    """Sequence number within the attempt, starting from 1."""
    slices: tuple[Slice, ...]
    """Empty if only the batch size changes."""
    batch_size: int | None
    """Global batch size, starting with the round that adds the slots; None keeps the batch size."""

    @property
    def name(self) -> str:
        return f"grow {self.number}"


@dataclass(frozen=True)
class Recall:
    """Release slots and continue training without them. The slots belong to the attempt until they
    are released. A RESIZED frame reports the slots that the attempt holds afterwards, even if it
    could not release these slots."""

    number: int
    """Grants and recalls share one sequence of numbers."""
    slices: tuple[Slice, ...]
    batch_size: int | None
    """Global batch size, starting with the round that releases the slots; None keeps the batch
    size."""

    @property
    def name(self) -> str:
        return f"recall {self.number}"


@dataclass(frozen=True)
class Limit:
    """Change the running time after which the attempt ends, which was set when the attempt was
    launched."""

    number: int
    """Sequence number within the attempt, starting from 1."""
    max_runtime_s: float | None
    """Maximum running time of this attempt in seconds; None if there is no limit."""

    @property
    def name(self) -> str:
        return f"limit {self.number}"


Command = Stop | Leave | Drill | Grant | Recall | Limit
