"""Exit codes, and errors formatted for a terminal: one sentence, never a traceback."""

from __future__ import annotations

from enum import IntEnum

from dray import errors


class Exit(IntEnum):
    OK = 0
    JOB_ENDED_BADLY = 1
    """A watched job failed or was cancelled, or a job did not recover from a drill."""
    USAGE = 2
    """The command line or the job document is invalid."""
    REFUSED = 3
    """The request is not allowed, conflicts with the job's state, or names something that does not
    exist."""
    NO_SERVER = 4
    """The server can't be reached, or failed."""
    TIME_WAS_UP = 5
    """The command timed out while waiting; the job continues."""
    INTERRUPTED = 130


HELP = (
    "Exit codes: 0 success; 1 the watched job failed or was cancelled, or a drill failed; 2 "
    "invalid usage or job document; 3 not found, conflict or not allowed; 4 the server failed or "
    "can't be reached; 5 timed out while waiting; 130 interrupted."
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
    """Return the error message with the invalid field and the hint."""
    if not isinstance(error, errors.ApiError | errors.SpecError):
        return f"error: {error}"
    where = f" (at {error.pointer})" if error.pointer else ""
    hint = f"\nhint: {error.hint}" if error.hint else ""
    if isinstance(error, errors.ServerError) and error.request_id:
        hint += f"\nfor details, look for request {error.request_id} in the server's log"
    return f"error: {error.detail}{where}{hint}"
