"""Computes ranges of expected starts from three simulations: with the shortest, the middle and the
longest time that the jobs are likely to have left."""

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
"""Factor by which the next run may be shorter than the shortest earlier run, or longer than the
longest earlier run."""
ENOUGH_RUNS = 5
"""Minimum number of runs for estimating the length of a job that has never run."""


def plays(situation: Situation, now: datetime, **more: Any) -> list[Simulation]:
    """Return the simulations that `expected` needs. more: arguments of `Simulation`."""
    return [Simulation(situation.paced(share), now, **more) for share in SHARES]


def expected(situation: Situation, played: Sequence[Simulation]) -> dict[str, Expected]:
    """Return the expected starts with their ranges. played: the finished simulations of this
    situation."""
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
        message = f"the job starts after {jobs} of unknown length"
        return Expected(None, Reason("unknown_length", message))
    times = [each.at for each in found if each.at is not None]
    return Expected(
        middle.at,
        num_assumed=middle.num_assumed,
        earliest=min(times),
        latest=max(times) if len(times) == len(found) else None,
    )


def of_usual(runs: Sequence[float]) -> TimeLeft | None:
    """Return the range of the middle 80% of the running times; None if there are too few running
    times."""
    if len(runs) < ENOUGH_RUNS:
        return None
    in_order = sorted(runs)
    return TimeLeft(in_order[len(runs) // 10], in_order[-1 - len(runs) // 10])


def by_earlier_runs(earlier_s: Sequence[float], ran_s: float) -> TimeLeft | None:
    """Estimate a job's remaining time from the runs of similar earlier jobs. Returns None if
    there are no such runs, or if the job has already run longer than these runs suggest. ran_s:
    seconds that the job has run."""
    newest = earlier_s[-forecast.NEWEST :]
    if not newest or ran_s >= WIDER * max(newest):
        return None
    return TimeLeft(max(0.0, min(newest) / WIDER - ran_s), WIDER * max(newest) - ran_s)
