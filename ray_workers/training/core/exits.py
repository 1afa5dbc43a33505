"""Ends a script, and the processes that it forks, in the same way as the Python interpreter would.

This module does not import torch, because the rank of a script may have a different version of
torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from ray_workers.shared.contracts import LEFT_EXIT_CODE
from ray_workers.training.core.failure_reason import traceback_from_script


class Left(SystemExit):
    """The process was asked to leave, and is leaving. Not a subclass of `Exception`, so that a
    script that handles errors in its steps does not catch it."""

    def __init__(self) -> None:
        super().__init__(LEFT_EXIT_CODE)


def status_of(leaving: SystemExit) -> int:
    """Return the exit status that Python would use: the lowest 8 bits of an int, and 1 for an
    object that is not an int, such as 0.0."""
    code = leaving.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    # The interpreter converts the exit code to a C long, or to -1 if the exit code does not fit.
    return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF


def words_of(leaving: SystemExit) -> str:
    """Return the line that Python prints before exiting; empty if it prints nothing."""
    return "" if leaving.code is None or isinstance(leaving.code, int) else f"{leaving.code}\n"


@contextlib.contextmanager
def children_leave() -> Iterator[None]:
    """A context in which to run the program of a rank. If a process forked by the program reaches
    the end of the program, with or without an exception, it exits at the end of this context, as in
    plain Python. Only the rank's own process executes the code after this context."""
    rank = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            raise
        _leave(error)
    if os.getpid() != rank:
        _leave(None)


def _leave(error: BaseException | None) -> NoReturn:
    status = 1
    try:
        status = _shown(error)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        status = 120  # Python's status for a stream that can't be flushed
    finally:
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)


def _shown(error: BaseException | None) -> int:
    """Print an error as Python would, and return the exit status."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if (words := words_of(error)) and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(words)
        return status_of(error)
    error.__traceback__ = traceback_from_script(error)
    sys.excepthook(type(error), error, error.__traceback__)
    return 1
