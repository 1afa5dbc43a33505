"""Recognises storage faults, and waits until the storage accepts a result.

A full or failing disk, or storage that does not respond, is a fault of the machine and never of the
training code, so it does not count towards `max_retries`.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable

WAIT_S = 600.0
"""Seconds to wait for space before the attempt ends; a later attempt writes the result again."""
PAUSE_S = 2.0

_FAULTS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
        *(errno.EROFS, errno.ENXIO, errno.ENODEV),
        getattr(errno, "EREMOTEIO", errno.EIO),  # only Linux has it
    }
)
_FAULTS_OF_FILES = frozenset({errno.ENOTCONN, errno.ETIMEDOUT})
"""Error numbers that are storage faults if the error has a file name. Without a file name, the
error comes from a socket."""
# Libraries that write files themselves (safetensors, torch.save) raise their own errors.
_STORAGE_ERROR = re.compile(
    r"no space left on device|disk quota exceeded|input/output error|stale file handle"
    r"|file too large|StorageFull|PytorchStreamWriter failed writing"
    r"|read-only file system|remote i/o error"
    r"|(strerror|i/o error): (no such device|transport endpoint is not|connection timed out)",
    re.IGNORECASE,
)
_RAISED_BY_LIBRARIES = ("RuntimeError", "SafetensorError")


class StorageError(OSError):
    """The storage failed to read or write a file."""


def is_storage_fault(error: BaseException) -> bool:
    """Whether an error, or an error that caused it, is a fault of a disk or of the storage."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StorageError):
            return True
        if isinstance(seen, OSError) and (
            seen.errno in _FAULTS or (seen.errno in _FAULTS_OF_FILES and seen.filename is not None)
        ):
            return True
        if type(seen).__name__ in _RAISED_BY_LIBRARIES and _STORAGE_ERROR.search(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def wait_for_space(
    what: str, write: Callable[[], None], *, waiting: Callable[[], None] = lambda: None
) -> None:
    """Call `write` until it succeeds. Raises StorageError after `WAIT_S` seconds.

    what: name of the result, for the log. waiting: called before each pause. Errors other than
    storage faults are raised at once.
    """
    began = time.monotonic()
    is_logged = False
    while True:
        try:
            write()
        except Exception as error:
            if not is_storage_fault(error):
                raise
            if time.monotonic() - began >= WAIT_S:
                raise StorageError(
                    f"{what} could not be written within {WAIT_S:g} s: {error}"
                ) from error
            if not is_logged:
                log(f"{what} can't be written; retrying for up to {WAIT_S:g} s: {error}")
                is_logged = True
        else:
            break
        waiting()
        time.sleep(PAUSE_S)
    if is_logged:
        log(f"{what} was written after retrying for {time.monotonic() - began:.0f} s")


def log(sentence: str) -> None:
    """Write a line to the job's log (standard output), unless the script has closed it or
    redirected it to a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(f"dray: {sentence}", flush=True)  # noqa: T201
