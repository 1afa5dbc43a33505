"""Hangs of a job, and faults that were injected into it."""

from __future__ import annotations

from datetime import datetime

from dray.drills import DrillKind, DrillState
from dray.views.base import View


class HangRank(View):
    """Position of one rank."""

    rank: int
    step: int | None = None
    phase: str | None = None
    collective: int | str | None = None
    """The last collective that the rank entered."""
    since_s: float | None = None
    """Seconds that the rank had been in its phase."""
    stack: str | None = None


class Hang(View):
    """A hang, with the position of every rank."""

    seq: int
    """Number of the hang within the job, from 1; only the newest hangs are kept."""
    attempt: int
    time: datetime
    culprits: list[int]
    """Ranks that the other ranks were waiting for."""
    step: int | None = None
    phase: str | None = None
    """Phase of the culprits, such as `data_wait` or `forward`."""
    waited_s: float | None = None
    limit_s: float | None = None
    """Seconds without progress after which a rank hangs, derived from the job's step time."""
    ranks: list[HangRank]


class HangPage(View):
    items: list[Hang]


class Drill(View):
    """A fault injected on request, and the recovery of the job."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None = None
    """Optimizer steps after which the fault is injected; unset, it is injected immediately."""
    attempt: int
    state: DrillState
    step: int | None = None
    """Optimizer steps done when the fault was injected."""
    recovery_s: float | None = None
    """Seconds from the injection until the job trained again."""
    steps_lost: int | None = None
    message: str
    created_at: datetime
    finished_at: datetime | None = None


class DrillPage(View):
    items: list[Drill]
