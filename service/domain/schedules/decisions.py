"""Decides which of a schedule's times get a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from dray.views import MissedRuns
from service.domain.schedules.cron import Cron

MAX_CAUGHT_UP: Final = 100
"""Maximum number of missed runs that `missed: all` submits; the latest are submitted."""
ON_TIME_S: Final = 300
"""With `missed: skip`, a run that can't be submitted within this number of seconds of its time
counts as missed, unless the schedule has its own deadline."""


@dataclass(frozen=True)
class DueTimes:
    """The decision about a schedule's due times."""

    run_at: datetime | None
    """The time whose run is to be submitted now; None if there is none."""
    missed: tuple[datetime, ...]
    """Earlier times that get no run, at most `MAX_CAUGHT_UP` + 1 of them; the latest ones."""


def decide(
    cron: Cron, missed: MissedRuns, deadline_s: int | None, after: datetime, now: datetime
) -> DueTimes:
    """Decide about the times later than `after`, which is the last time for which a decision was
    made. With `missed: all`, several times can be due; the first of them is decided."""
    most = MAX_CAUGHT_UP if missed is MissedRuns.ALL else 1
    times = cron.latest(after, now, MAX_CAUGHT_UP + 1)
    if deadline_s is None and missed is MissedRuns.SKIP:
        deadline_s = ON_TIME_S
    due = times[-most:]
    if deadline_s is not None:
        due = [time for time in due if now - time <= timedelta(seconds=deadline_s)]
    run_at = due[0] if due else None
    return DueTimes(run_at, tuple(time for time in times if run_at is None or time < run_at))
