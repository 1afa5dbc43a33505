"""A lock for functions that several threads can call. A signal handler can't call such a function
while another call is in progress."""

from __future__ import annotations

import os
import threading
from types import TracebackType


class CallLock:
    """Lets one call run at a time. Threads wait for each other.

    A signal handler runs in the main thread. If the signal has interrupted a call, waiting would
    deadlock, so the lock raises RuntimeError instead. In a forked process, the lock is initially
    free."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        # A signal handler that runs before the next line may still call dray.train, because the
        # handler's call then finishes before this call starts.
        self._depth += 1
        if self._depth > 1:
            self._depth -= 1
            self._lock.release()
            raise RuntimeError(
                "a signal handler called a function of dray.train while another call was "
                "running: only set a flag in the handler, and call the function in the training "
                "loop"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        self._lock.release()
