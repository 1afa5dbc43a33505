"""Exit codes, and the form of errors on a terminal: one sentence, never a traceback."""

from __future__ import annotations

from enum import IntEnum

from dray import errors


class Exit(IntEnum):
    OK = 0
    JOB_ENDED_BADLY = 1
    """A watched job failed or was cancelled, or a job did not recover from a drill."""
    USAGE = 2
    """The command line or the job document is wrong."""
    REFUSED = 3
    """The request is not allowed, conflicts with the job's state, or names something unknown."""
    NO_SERVER = 4
    """The server can't be reached, or failed."""
    TIME_WAS_UP = 5
    """The command timed out while it waited; the job goes on."""
    INTERRUPTED = 130


HELP = (
    "Exit codes: 0 done; 1 the watched job failed or was cancelled, or a drill failed; 2 wrong "
    "usage or job document; 3 not found, conflict or not allowed; 4 the server can't be reached "
    "or failed; 5 the time to wait was up; 130 interrupted."
)


_REFUSED = (
    errors.NotFound,
    errors.Conflict,
    errors.Unauthorized,
    errors.Forbidden,
    errors.IntegrityError,
    errors.QuotaExceeded,
)


def exit_code(error: errors.DrayError) -> Exit:
    if isinstance(error, errors.WaitTimeout | errors.ArrayWaitTimeout):
        return Exit.TIME_WAS_UP
    if isinstance(error, _REFUSED):
        return Exit.REFUSED
    if isinstance(error, errors.TransportError | errors.ServerError):
        return Exit.NO_SERVER
    return Exit.USAGE


def sentence(error: errors.DrayError) -> str:
    """The error with the field at fault and the hint."""
    if not isinstance(error, errors.ApiError | errors.SpecError):
        return f"error: {error}"
    where = f" (at {error.pointer})" if error.pointer else ""
    hint = f"\nhint: {error.hint}" if error.hint else ""
    if isinstance(error, errors.ServerError) and error.request_id:
        hint += f"\nthe server's log has more about the request {error.request_id}"
    return f"error: {error.detail}{where}{hint}"
