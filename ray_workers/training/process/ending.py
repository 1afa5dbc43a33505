"""Ends a rank's process: determines its exit code, and reports its error to the spool. Does not
import torch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dray import train
from dray.train.storage_faults import is_storage_fault
from ray_workers.shared.contracts import LEFT_EXIT_CODE, STORAGE_EXIT_CODE, Cause, RankTask
from ray_workers.shared.frames import ErrorReport
from ray_workers.training.core import elastic_error
from ray_workers.training.core.device_faults import as_lost
from ray_workers.training.core.error_chain import chain_of
from ray_workers.training.core.exits import Left, status_of, words_of
from ray_workers.training.core.failure_reason import (
    MAX_CHARS,
    advised,
    is_ours,
    reason_of,
    traceback_of,
)

MAX_TRACEBACK_CHARS = 32_000
CONSEQUENCE = "a consequence of another failure: another rank exited, hung or could not be reached"
"""Appended to the traceback and the reason of a rank whose error is not the root cause."""


def flush_output() -> None:
    """Flush the streams that the script left open."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the script could have closed it
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201


@dataclass(frozen=True)
class RankEnd:
    """Classifies and reports the errors of a rank."""

    task: RankTask
    cause_of: Callable[[BaseException], Cause]
    masked: Callable[[str], str]
    """Removes the values of secrets from a string."""
    has_code: bool
    """Whether the job's code was uploaded."""

    def after_error(self, error: BaseException) -> int:
        """Print and report an error, and return the exit code."""
        raised_at = time.time()  # recorded first, because writing the report can take long
        text = traceback_of(error)
        _print(text)
        reason = reason_of(error, self.masked)
        reason = advised(reason, error, has_code=self.has_code, max_chars=MAX_CHARS)
        cause = self.cause_of(error)
        if cause is Cause.WORKER_LOST and not is_ours(error):
            reason = self._marked(reason)
        self._report(cause, error, reason, text, raised_at)
        return STORAGE_EXIT_CODE if is_storage_fault(error) else 1

    def after_exit(self, leaving: SystemExit) -> int:
        """Return the code with which Python would exit. If the code is not 0, also write an ERROR
        frame."""
        if isinstance(leaving, Left):
            return LEFT_EXIT_CODE
        status = status_of(leaving)
        if status == 0:
            return 0
        raised_at = time.time()
        _print(words_of(leaving))
        # If the script exits while handling an error caused by a lost peer, the exit is also a
        # consequence of the loss.
        is_secondary_failure = any(
            self.cause_of(each) is Cause.WORKER_LOST for each in chain_of(leaving)
        )
        reason, text = reason_of(leaving, self.masked), traceback_of(leaving)
        if recorded := elastic_error.recorded(Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))):
            words, stack = recorded
            is_secondary_failure = is_secondary_failure or elastic_error.is_secondary_failure(words)
            reason, text = f"{words} (then {reason})", stack or text
        cause = Cause.WORKER_LOST if is_secondary_failure else Cause.USER_ERROR
        reason = self._marked(reason) if is_secondary_failure else reason
        lost = as_lost(leaving)  # if the script exits while handling an error of its GPU
        if lost is not leaving:
            cause, reason = Cause.WORKER_LOST, str(lost)
        self._report(cause, lost, reason, text, raised_at)
        return status

    def _marked(self, reason: str) -> str:
        """Mark the reason as a consequence of another rank's failure, and print a message that
        states this."""
        if self.task.world_size == 1:
            return reason
        _print(f"dray: the error above is {CONSEQUENCE}\n")
        return f"{reason[: MAX_CHARS - len(CONSEQUENCE) - 2]}; {CONSEQUENCE}"

    def _report(
        self, cause: Cause, error: BaseException, reason: str, text: str, raised_at: float
    ) -> None:
        try:
            report = ErrorReport(
                cause=cause,
                type=type(error).__qualname__,
                message=self.masked(reason),
                traceback=self.masked(text)[-MAX_TRACEBACK_CHARS:],
                raised_at=raised_at,
                seat=self.task.rank,
                incarnation=self.task.incarnation,
            )
            train.emit(report.KIND, report.body())
        except OSError as failed:
            _print(f"dray: can't report the error: {failed}\n")
