"""The interval between checkpoints, based on the measured cost of a save."""

from __future__ import annotations

import math
import statistics
from collections import deque

FIRST_SAVE_S = 10.0
"""With `every_steps: auto`, seconds of training before the first save, which is used to measure the
cost of a save."""
MAX_INTERVAL_S = 600.0
"""Maximum number of seconds of training that a failure can lose with the interval `auto`."""
MAX_SHARE = 0.05
"""With `auto`, saves take at most this share of the time."""
NUM_STEPS = 64
"""Number of steps whose durations are averaged to get the usual duration of a step."""
NUM_COSTS = 5


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval between saves that minimises the total time lost to saves and to repeated
    steps.

    cost_s: the time that a save adds to the run; mtbf_s: mean time between failures of the group.
    Young 1974, 'A first order approximation to the optimum checkpoint interval', CACM 17(9).
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def interval_s(cost_s: float, write_s: float, mtbf_s: float) -> float:
    """Return Young's interval, but at most MAX_INTERVAL_S. A longer interval is returned if saves
    would otherwise take more than MAX_SHARE of the time, or would not be written before the next
    one is due.

    write_s: the time from the beginning of a save to its commit.
    """
    wanted = min(young_interval_s(cost_s, mtbf_s), MAX_INTERVAL_S)
    return max(wanted, cost_s / MAX_SHARE, write_s)


class StallMeter:
    """Measures the time that each save adds to the loop: the time for which the save blocks the
    loop, and the additional time that steps take while the save is being written."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=NUM_STEPS)
        self._blocked_s: float | None = None
        self._added_s = 0.0

    @property
    def step_s(self) -> float:
        """The usual duration of a step in seconds; NaN before the first step."""
        return statistics.fmean(self._usual) if self._usual else math.nan

    @property
    def is_open(self) -> bool:
        """Whether the stall of the last save is still being measured."""
        return self._blocked_s is not None

    def began(self, blocked_s: float) -> None:
        """Record that a save began and blocked the loop for `blocked_s`."""
        self._blocked_s, self._added_s = blocked_s, 0.0

    def ended(self, waited_s: float) -> float:
        """Return the stall, in seconds, caused by a save that ended while the loop was waiting for
        it between two steps."""
        assert self._blocked_s is not None, "no save was begun"
        stall, self._blocked_s = self._blocked_s + max(0.0, self._added_s) + waited_s, None
        return stall

    def step_took(self, seconds: float, *, is_saving: bool) -> float | None:
        """Count a step. At the first step after the end of a save, return the number of seconds
        for which the save stalled training; otherwise, return None.

        is_saving: whether the save is still in progress at the end of the step.
        """
        if self._blocked_s is None:
            self._usual.append(seconds)
            return None
        if self._usual:
            self._added_s += seconds - self.step_s
        return None if is_saving else self.ended(0.0)


class CheckpointInterval:
    """Decides when the next save is due with `every_steps: auto`, on the rank that saves."""

    def __init__(self, worker_mtbf_s: float) -> None:
        """worker_mtbf_s: mean time between failures of one worker."""
        self._worker_mtbf_s = worker_mtbf_s
        self._world_size = 1
        self._costs: deque[float] = deque(maxlen=NUM_COSTS)
        self._write_s = self._step_s = 0.0
        self._last_step: int | None = None
        self._since_s = 0.0
        self.is_measuring = False
        """Whether a save has begun whose cost is not known yet."""
        self.every_steps: int | None = None
        """None until a save has been measured."""

    def starts_at(self, step: int, world_size: int) -> None:
        """Record that training begins after this step, on `world_size` workers."""
        self._last_step, self._since_s = step, 0.0
        if world_size != self._world_size:
            self._world_size = world_size
            if self.every_steps is not None:
                self._choose()

    def saved_at(self, step: int) -> None:
        """Record that a save began, whether or not it was due according to this interval."""
        self._last_step, self._since_s = step, 0.0
        self.is_measuring = True

    def measured(self, cost_s: float, write_s: float, step_s: float) -> int:
        """Recalculate the interval from the costs of the last saves, and return it in steps."""
        self.is_measuring = False
        self._costs.append(cost_s)
        self._write_s, self._step_s = write_s, step_s
        return self._choose()

    def _choose(self) -> int:
        mtbf_s = self._worker_mtbf_s / self._world_size
        interval = interval_s(statistics.median(self._costs), self._write_s, mtbf_s)
        self.every_steps = max(1, round(interval / self._step_s))
        return self.every_steps

    def step_took(self, seconds: float) -> None:
        self._since_s += seconds

    def steps_left(self, step: int) -> int:
        """Return the number of steps until the next save is due; 0 before the first save was
        measured."""
        if self.every_steps is None or self._last_step is None:
            return 0
        return max(0, self._last_step + self.every_steps - step)

    def is_due(self, step: int) -> bool:
        assert self._last_step is not None, "training has not begun"
        if self.every_steps is None:
            return self._since_s >= FIRST_SAVE_S and not self.is_measuring
        return step - self._last_step >= self.every_steps or self._since_s >= MAX_INTERVAL_S
