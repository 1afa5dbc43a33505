"""Storage faults: recognising them, and waiting until the storage takes a result.

A full or failing disk, or a store that does not answer, is a fault of the machine and never of the
training code, so it is not charged to `max_retries`.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable

WAIT_S = 600.0
"""Seconds that a result waits for room before the attempt ends; a later attempt writes it again."""
PAUSE_S = 2.0

_FAULTS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
        *(errno.EROFS, errno.ENXIO, errno.ENODEV),
        getattr(errno, "EREMOTEIO", errno.EIO),  # Linux alone has it
    }
)
_FAULTS_OF_FILES = frozenset({errno.ENOTCONN, errno.ETIMEDOUT})
"""Faults where the error names a file; without one, a socket raised them."""
# Libraries that write files by themselves (safetensors, torch.save) raise errors of their own.
_STORAGE_ERROR = re.compile(
    r"no space left on device|disk quota exceeded|input/output error|stale file handle"
    r"|file too large|StorageFull|PytorchStreamWriter failed writing"
    r"|read-only file system|remote i/o error"
    r"|(strerror|i/o error): (no such device|transport endpoint is not|connection timed out)",
    re.IGNORECASE,
)
_RAISED_BY_LIBRARIES = ("RuntimeError", "SafetensorError")


class StorageError(OSError):
    """The storage did not take or give a file."""


def is_storage_fault(error: BaseException) -> bool:
    """Whether an error, or an error that caused it, is a fault of a disk or a store."""
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


def wait_for_room(
    what: str, write: Callable[[], None], *, waiting: Callable[[], None] = lambda: None
) -> None:
    """Call `write` until it succeeds; raises StorageError after `WAIT_S` seconds.

    what: name of the result for the log. waiting: called before each pause. Errors other than
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
                log(f"{what} can't be written and waits for room, {WAIT_S:g} s at most: {error}")
                is_logged = True
        else:
            break
        waiting()
        time.sleep(PAUSE_S)
    if is_logged:
        log(f"{what} was written after {time.monotonic() - began:.0f} s")


def log(sentence: str) -> None:
    """Write a line to the job's log, which is standard output, unless the script closed it or
    redirected it to a disk that is full."""
    with contextlib.suppress(OSError, ValueError):
        print(f"dray: {sentence}", flush=True)  # noqa: T201
