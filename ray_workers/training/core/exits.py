"""Ends a script, and the processes that it forks, in the way of Python's interpreter.

Needs no torch, because the rank of a script may have another version of it.
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
    """The process was asked to leave, and leaves. This is no `Exception`, so a script that handles
    errors of its steps does not catch it."""

    def __init__(self) -> None:
        super().__init__(LEFT_EXIT_CODE)


def status_of(leaving: SystemExit) -> int:
    """The exit status with which Python would end: 1 for an object that is no int, such as 0.0, and
    the last 8 bits of an int."""
    code = leaving.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    # The interpreter uses a C long, and -1 for a number that does not fit.
    return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF


def words_of(leaving: SystemExit) -> str:
    """The line that Python prints before the exit; empty if it prints none."""
    return "" if leaving.code is None or isinstance(leaving.code, int) else f"{leaving.code}\n"


@contextlib.contextmanager
def children_leave() -> Iterator[None]:
    """Run the program of a rank in this context. A process that the program forks, and that reaches
    the end of the program with or without an exception, ends here as under plain Python: the code
    around the context belongs to the rank."""
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
