"""Measures how a script uses its time, based on its calls to `dray.train`.

The time before the first report of a step counts as unreported. Later time counts as recomputed
time up to the last step that an earlier attempt reported, and as useful time after that step. While
a script saves or loads files in its main thread, the time counts as checkpointing. Saving or
loading in another thread doesn't affect the category, because training continues.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.core.exits import status_of

MAX_STEP = 2**63 - 1
"""The highest step that the heartbeat page can hold and that the service accepts."""


class ScriptTime:
    """Records the script's time on the rank's heartbeat page. Calls from threads, signal handlers,
    and forked processes are safe: a call that overlaps with another call records nothing, and the
    next call records the time of both."""

    def __init__(self, page: HeartbeatPage, furthest_step: int) -> None:
        """furthest_step: the highest step reported by an earlier attempt of the job."""
        self._page = page
        self._furthest_step = furthest_step
        self._owner_pid = os.getpid()
        self._doing = RankPhase.COMPUTE
        self._use = TimeCategory.UNREPORTED
        """The category of time during which nothing is saved or loaded."""
        self._is_booking = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which to run the script. The time after the script's last report is recorded
        if the script ends without an error; if the script fails or is killed, this time is lost."""
        self._enter(self._doing, self._use)
        try:
            yield
        except SystemExit as leaving:
            if status_of(leaving) == 0:
                self._end()
            raise
        self._end()

    def stepped(self, step: int) -> None:
        self._use = TimeCategory.RECOMPUTED if step < self._furthest_step else TimeCategory.USEFUL
        self._enter(self._doing, self._use, step)

    @contextmanager
    def storing(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._enter(RankPhase.SAVE, TimeCategory.CHECKPOINTING)
        try:
            yield
        finally:
            self._enter(self._doing, self._use)

    def _end(self) -> None:
        self._doing = RankPhase.FINISH
        self._enter(self._doing, self._use)

    def _enter(self, phase: RankPhase, use: TimeCategory, step: int | None = None) -> None:
        # A forked process inherits its parent's heartbeat page, but must not write to it.
        if os.getpid() != self._owner_pid or not self._is_booking.acquire(blocking=False):
            return
        try:
            self._page.enter(phase, use)
            if step is not None:
                self._page.commit(min(step, MAX_STEP))
        finally:
            self._is_booking.release()
