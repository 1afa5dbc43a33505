"""A job's progress, and the range of times in which it ends at the measured paces.

A mark is a time in seconds and the step that was reached then. A few marks are kept with the job's
progress, evenly spread over the training time of the attempt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

RATES: Final = ("samples_per_s", "earliest_end_at", "latest_end_at", "marks")
"""The parts of a progress that are valid only while the job trains."""
MAX_MARKS = 24
MIN_PACES = 4
"""A job with fewer measured paces, or less than `MIN_S` of them, has no expected end."""
MIN_S = 5.0
SURE = 1.3
"""Error of the mean pace that the range allows for, in standard deviations."""
FEW = 4.0
"""The error grows by the factor 1 + FEW / n for n paces: few paces make their spread uncertain."""
MARGIN = 0.1
"""Share by which the range widens on each side for each doubling of the measured steps up to the
last step, for later evaluations, checkpoints and neighbours that were not measured."""
MAX_TREND = 2.0
"""Largest factor by which a changing pace is expected to change."""


FARTHEST_S = 365 * 86400.0
"""Longest time left in seconds with an expected end. Longer times stand for "without end"."""


class Mark(NamedTuple):
    """A step and the time when it was reached."""

    at_s: float
    step: int


class TimeLeft(NamedTuple):
    """The least and the most seconds that a job has left."""

    earliest_s: float
    latest_s: float

    def at(self, share: float) -> float:
        """Return the seconds at this share of the range, from 0 for the least to 1 for the most."""
        return self.earliest_s + share * (self.latest_s - self.earliest_s)


def without_rates(progress: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the progress of a job that does not train now."""
    return {**progress, **dict.fromkeys(RATES)} if progress else None


def reached(marks: Sequence[Mark], new: Mark) -> list[Mark]:
    """Return the marks with a new one. They start again if the job went back to an earlier step."""
    if marks and new.step < marks[-1].step:
        return [new]
    if marks and (new.step == marks[-1].step or new.at_s <= marks[-1].at_s):
        return list(marks)
    found = [*marks, new]
    if len(found) > MAX_MARKS:
        inner = range(1, len(found) - 1)
        del found[min(inner, key=lambda n: found[n + 1].at_s - found[n - 1].at_s)]
    return found


def seconds_left(marks: Sequence[Mark], total_steps: int) -> TimeLeft | None:
    """Return the seconds from the newest mark to the last step; None without enough measured paces.

    The range covers the mean pace with its error from the spread of the measured paces, the pace of
    the newer half, and that pace with the trend from the older half to the newer.
    """
    if len(marks) <= MIN_PACES or marks[-1].at_s - marks[0].at_s < MIN_S:
        return None
    left = max(0, total_steps - marks[-1].step)
    mean, spread = _pace(marks), _spread(marks)
    measured = marks[-1].step - marks[0].step
    error = spread * math.sqrt(left + left * left / measured)
    older, newer = _halves(marks)
    # From the middle of the newer half to the middle of the steps left, in units of a half.
    trend = newer + (newer - older) * (0.5 + min(left, 2 * measured) / measured)
    paces = newer, min(max(trend, newer / MAX_TREND), newer * MAX_TREND)
    low = min(mean * left - error, *(pace * left for pace in paces))
    high = max(mean * left + error, *(pace * left for pace in paces))
    wider = 1 + MARGIN * math.log2(2 + left / measured)
    return TimeLeft(max(0.0, low / wider), high * wider)


def end_between(
    marks: Sequence[Mark], total_steps: int, at_the_latest: datetime | None
) -> tuple[datetime, datetime] | None:
    """Return the earliest and the latest time at which a job ends; None if unknown. at_the_latest:
    when its `max_runtime_s` ends it."""
    left = seconds_left(marks, total_steps)
    if left is None or left.latest_s > FARTHEST_S:
        return None
    newest = datetime.fromtimestamp(marks[-1].at_s, UTC)
    earliest, latest = (newest + timedelta(seconds=seconds) for seconds in left)
    if at_the_latest is not None:
        return min(earliest, at_the_latest), min(latest, at_the_latest)
    return earliest, latest


def _pace(marks: Sequence[Mark]) -> float:
    """Return the seconds per step."""
    return (marks[-1].at_s - marks[0].at_s) / (marks[-1].step - marks[0].step)


def _spread(marks: Sequence[Mark]) -> float:
    """Return the error of the seconds of n steps, divided by sqrt(n). Long phases of fast or slow
    paces show in a few long intervals, and pauses in many short intervals."""
    return max(
        _error(marks[::-width][::-1]) for width in (1, 2, 4) if len(marks) > MIN_PACES * width
    )


def _error(marks: Sequence[Mark]) -> float:
    pace, number = _pace(marks), len(marks) - 1
    squares = sum(
        (after.at_s - before.at_s - pace * (after.step - before.step)) ** 2
        for before, after in itertools.pairwise(marks)
    )
    steps = marks[-1].step - marks[0].step
    return SURE * (1 + FEW / number) * math.sqrt(squares / steps * number / (number - 1))


def _halves(marks: Sequence[Mark]) -> tuple[float, float]:
    """Return the paces of the older and the newer half of the steps."""
    half = (marks[0].step + marks[-1].step) / 2
    middle = min(range(1, len(marks) - 1), key=lambda n: abs(marks[n].step - half))
    return _pace(marks[: middle + 1]), _pace(marks[middle:])
