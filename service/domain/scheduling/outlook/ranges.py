"""Ranges of expected starts: the policy played with the least, the middle and the most time that
the jobs are likely to have left."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from service.domain.progress import TimeLeft
from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.outlook.simulation import Expected, Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.rules.obstacles import Reason

SHARES = (0.0, 0.5, 1.0)
MIDDLE = SHARES.index(0.5)
WIDER = 1.25
"""The factor by which earlier runs may have been shorter and longer than the next one."""
ENOUGH_RUNS = 5
"""Fewer runs of any jobs do not tell how long a job takes that has never run."""


def plays(situation: Situation, now: datetime, **more: Any) -> list[Simulation]:
    """The plays of a forecast, for `expected`. more: as for each `Simulation`."""
    return [Simulation(situation.paced(share), now, **more) for share in SHARES]


def expected(situation: Situation, played: Sequence[Simulation]) -> dict[str, Expected]:
    """The starts, with their ranges. played: the plays of this situation, each at its end."""
    starts = [play.starts for play in played]
    is_usual_known = situation.usual_range_s is not None
    return {
        job_id: _ranged([each[job_id] for each in starts], is_usual_known)
        for job_id in starts[MIDDLE]
    }


def _ranged(found: Sequence[Expected], is_usual_known: bool) -> Expected:
    middle = found[MIDDLE]
    if middle.at is None:
        return middle
    if middle.num_assumed and not is_usual_known:
        number = middle.num_assumed
        jobs = "a job" if number == 1 else f"{number} jobs"
        message = f"it starts after {jobs} of unknown length"
        return Expected(None, Reason("unknown_length", message))
    times = [each.at for each in found if each.at is not None]
    return Expected(
        middle.at,
        num_assumed=middle.num_assumed,
        earliest=min(times),
        latest=max(times) if len(times) == len(found) else None,
    )


def of_usual(runs: Sequence[float]) -> TimeLeft | None:
    """The range of nine of ten runs, by what any jobs ran."""
    if len(runs) < ENOUGH_RUNS:
        return None
    in_order = sorted(runs)
    return TimeLeft(in_order[len(runs) // 10], in_order[-1 - len(runs) // 10])


def by_earlier_runs(earlier_s: Sequence[float], ran_s: float) -> TimeLeft | None:
    """The time that a job has left by the runs of earlier jobs like it; None without such runs, and
    where it has run for longer than they did. ran_s: for how long it has run."""
    newest = earlier_s[-forecast.NEWEST :]
    if not newest or ran_s >= WIDER * max(newest):
        return None
    return TimeLeft(max(0.0, min(newest) / WIDER - ran_s), WIDER * max(newest) - ran_s)
