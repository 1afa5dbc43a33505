"""A job's progress, and the range of its expected end times, which is estimated from measured
paces.

A mark is a time in seconds and the step that was reached at this time. A few marks are stored with
the job's progress, spread evenly over the training time of the attempt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

RATES: Final = ("samples_per_s", "earliest_end_at", "latest_end_at", "marks")
"""Fields of the progress that are valid only while the job is training."""
MAX_MARKS = 24
MIN_INTERVALS = 4
"""A job has no expected end if it has fewer measured paces than this number, or if they span less
than `MIN_S` seconds."""
MIN_S = 5.0
SURE = 1.3
"""The range allows for an error of this many standard deviations in the mean step time."""
FEW = 4.0
"""The error is multiplied by 1 + FEW / n for n intervals between marks, because the spread of a few
intervals is uncertain."""
MARGIN = 0.1
"""Each side of the range is widened by this fraction for every factor of two between the number of
measured steps and the job's total number of steps. The margin covers evaluations, checkpoints and
neighbouring jobs that the measured steps don't include."""
MAX_TREND = 2.0
"""Maximum factor by which an extrapolated trend can change the pace."""


FARTHEST_S = 365 * 86400.0
"""Maximum remaining time, in seconds, for which the end of a job is forecast."""


class Mark(NamedTuple):
    """A step, and the time at which it was reached."""

    at_s: float
    step: int


class TimeLeft(NamedTuple):
    """The shortest and the longest remaining time of a job, in seconds."""

    earliest_s: float
    latest_s: float

    def at(self, share: float) -> float:
        """Return the remaining time at a position in the range, where 0 is the shortest and 1 the
        longest time."""
        return self.earliest_s + share * (self.latest_s - self.earliest_s)


def without_rates(progress: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the progress without the fields that are valid only while the job is training."""
    return {**progress, **dict.fromkeys(RATES)} if progress else None


def reached(marks: Sequence[Mark], new: Mark) -> list[Mark]:
    """Return the marks with a new mark added. If the job has gone back to an earlier step, only the
    new mark is kept."""
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
    """Return the time from the latest mark to the last step, in seconds; None if there are not
    enough marks.

    The range covers three estimates: the mean pace, with an error estimated from the spread of the
    paces; the pace of the newer half; and the pace that continues the trend from the older to the
    newer half.
    """
    if len(marks) <= MIN_INTERVALS or marks[-1].at_s - marks[0].at_s < MIN_S:
        return None
    left = max(0, total_steps - marks[-1].step)
    mean, spread = _seconds_per_step(marks), _spread(marks)
    measured = marks[-1].step - marks[0].step
    error = spread * math.sqrt(left + left * left / measured)
    older, newer = _halves(marks)
    # Extrapolate the trend from the middle of the newer half of the measured steps to the middle of
    # the remaining steps. The unit of this distance is half the number of measured steps.
    trend = newer + (newer - older) * (0.5 + min(left, 2 * measured) / measured)
    steps_s = newer, min(max(trend, newer / MAX_TREND), newer * MAX_TREND)
    low = min(mean * left - error, *(step_s * left for step_s in steps_s))
    high = max(mean * left + error, *(step_s * left for step_s in steps_s))
    wider = 1 + MARGIN * math.log2(2 + left / measured)
    return TimeLeft(max(0.0, low / wider), high * wider)


def end_between(
    marks: Sequence[Mark], total_steps: int, at_the_latest: datetime | None
) -> tuple[datetime, datetime] | None:
    """Return the earliest and latest expected end of a job; None if unknown. at_the_latest: the
    time at which `max_runtime_s` ends the job."""
    left = seconds_left(marks, total_steps)
    if left is None or left.latest_s > FARTHEST_S:
        return None
    newest = datetime.fromtimestamp(marks[-1].at_s, UTC)
    earliest, latest = (newest + timedelta(seconds=seconds) for seconds in left)
    if at_the_latest is not None:
        return min(earliest, at_the_latest), min(latest, at_the_latest)
    return earliest, latest


def _seconds_per_step(marks: Sequence[Mark]) -> float:
    """Return the mean time per step, in seconds."""
    return (marks[-1].at_s - marks[0].at_s) / (marks[-1].step - marks[0].step)


def _spread(marks: Sequence[Mark]) -> float:
    """Return the error margin of the duration of n steps, divided by sqrt(n). Intervals of several
    widths are used: wide ones reveal long fast or slow phases, and narrow ones reveal pauses."""
    return max(
        _error(marks[::-width][::-1]) for width in (1, 2, 4) if len(marks) > MIN_INTERVALS * width
    )


def _error(marks: Sequence[Mark]) -> float:
    step_s, number = _seconds_per_step(marks), len(marks) - 1
    squares = sum(
        (after.at_s - before.at_s - step_s * (after.step - before.step)) ** 2
        for before, after in itertools.pairwise(marks)
    )
    steps = marks[-1].step - marks[0].step
    return SURE * (1 + FEW / number) * math.sqrt(squares / steps * number / (number - 1))


def _halves(marks: Sequence[Mark]) -> tuple[float, float]:
    """Return the pace of the older and of the newer half of the steps."""
    half = (marks[0].step + marks[-1].step) / 2
    middle = min(range(1, len(marks) - 1), key=lambda n: abs(marks[n].step - half))
    return _seconds_per_step(marks[: middle + 1]), _seconds_per_step(marks[middle:])
