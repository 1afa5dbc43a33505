"""Views of hangs and of injected faults."""

from __future__ import annotations

from datetime import datetime

from dray.drills import DrillKind, DrillState
from dray.views.base import View


class HangRank(View):
    """The position of a rank in the code during a hang."""

    rank: int
    step: int | None = None
    phase: str | None = None
    collective: int | str | None = None
    """The last collective operation that the rank entered."""
    since_s: float | None = None
    """Seconds since the rank entered the phase."""
    stack: str | None = None


class Hang(View):
    """A hang, and where each rank was during the hang."""

    seq: int
    """Number of the hang within the job, starting at 1. Only the most recent hangs are kept."""
    attempt: int
    time: datetime
    culprits: list[int]
    """Ranks for which the other ranks were waiting."""
    step: int | None = None
    phase: str | None = None
    """Phase of the culprits, such as `data_wait` or `forward`."""
    waited_s: float | None = None
    limit_s: float | None = None
    """A rank counts as hanging after this many seconds without progress. The limit is derived from
    the job's step time."""
    ranks: list[HangRank]


class HangPage(View):
    items: list[Hang]


class Drill(View):
    """A fault that was injected on request, and the job's recovery."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None = None
    """Number of optimizer steps after which the fault is injected; unset if it is injected
    immediately."""
    attempt: int
    state: DrillState
    step: int | None = None
    """Number of optimizer steps completed when the fault was injected."""
    recovery_s: float | None = None
    """Seconds from the injection until the job resumed training."""
    steps_lost: int | None = None
    message: str
    created_at: datetime
    finished_at: datetime | None = None


class DrillPage(View):
    items: list[Drill]
