"""Storage faults: which errors are one, and waiting until the storage takes a result.

A full or failing disk, or a store that does not answer, is a fault of the machine and never of the
training code, so that no retry of the user's pays for it.
"""

from __future__ import annotations

import errno
import re
import sys
import time
from collections.abc import Callable

WAIT_S = 600.0
"""How long a result waits for room before the attempt ends; a later one writes it again."""
PAUSE_S = 2.0

_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})
# Libraries that write files by themselves (safetensors, torch.save) raise errors of their own.
_SAYS_SO = re.compile(
    r"no space left on device|disk quota exceeded|input/output error|stale file handle"
    r"|file too large|StorageFull|PytorchStreamWriter failed writing",
    re.IGNORECASE,
)
_RAISED_BY_LIBRARIES = ("RuntimeError", "SafetensorError")


class StorageError(OSError):
    """The storage did not take or give a file."""


def is_storage_fault(error: BaseException) -> bool:
    """Whether this error, or one that it was raised from, is the fault of a disk or a store."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StorageError):
            return True
        if isinstance(seen, OSError) and seen.errno in _FAULTS:
            return True
        if type(seen).__name__ in _RAISED_BY_LIBRARIES and _SAYS_SO.search(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def wait_for_room(
    what: str, write: Callable[[], None], *, waiting: Callable[[], None] = lambda: None
) -> None:
    """Call `write` until the storage takes what it writes, for `WAIT_S` seconds; then StorageError.

    what: for the log. waiting: called before each pause. Errors that are no storage faults are
    raised at once.
    """
    began = time.monotonic()
    is_told = False
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
            if not is_told:
                _log(f"{what} can't be written and waits for room, {WAIT_S:g} s at most: {error}")
                is_told = True
        else:
            break
        waiting()
        time.sleep(PAUSE_S)
    if is_told:
        _log(f"{what} was written after {time.monotonic() - began:.0f} s")


def _log(sentence: str) -> None:
    """A line in the job's log, which is what standard output is."""
    sys.stdout.write(f"dray: {sentence}\n")
    sys.stdout.flush()
