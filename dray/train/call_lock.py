"""A lock for calls that threads make, and that signal handlers must not make within each other."""

from __future__ import annotations

import os
import threading
from types import TracebackType


class CallLock:
    """Lets one call run at a time. Threads wait for each other.

    A signal handler runs in the main thread, within the call that the signal interrupts, and would
    wait for itself: it gets RuntimeError. A forked process begins without the calls of its parent.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        # A handler that comes before the next line finds no call, and ends before this one begins.
        self._depth += 1
        if self._depth > 1:
            self._depth -= 1
            self._lock.release()
            raise RuntimeError(
                "a signal handler called dray.train within another call of it: have the handler "
                "take note of the signal, and make the call in the training loop"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        self._lock.release()
