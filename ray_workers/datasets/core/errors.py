"""Error messages for invalid data, and the distinction between errors in the data and errors of the
node."""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

from dray.train.storage_faults import StorageError
from ray_workers.datasets.core.types import TransferError
from ray_workers.shared.paths import UntrustedFolder
from ray_workers.training.core.errors import DataError, SourceUnavailableError

MAX_SHOWN = 12
MEMBER_BYTES = 512
MAX_FAULT_CHARS = 300
_OF_DATA = (
    None,  # an OSError raised by a library, such as Pillow for a truncated image
    errno.EEXIST,
    errno.EILSEQ,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOMEM,
    errno.ENOTDIR,
    errno.EOVERFLOW,
)
"""Values of `errno` for errors that are caused by names, offsets and sizes in the data."""
_NO_THREAD = "can't start new thread"
_PANIC = "PanicException"
"""Name of the exception that Rust libraries raise, which does not derive from Exception."""


def broken(location: str, fault: str) -> DataError:
    """Return a DataError. location: a source, or a source with a line or sample."""
    return DataError(f"{printable(location)}: {printable(fault)}")


def printable(text: str) -> str:
    """Return the text on one line, with non-printable characters escaped. Names come from external
    sources and might not be UTF-8."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def reading(location: str, fault: str = "can't be read") -> Iterator[None]:
    """Convert any error that is raised while reading data to a DataError.

    Libraries raise errors of any type (OverflowError, struct.error, KeyError) for unexpected bytes,
    and would raise the same error if the bytes were read again. A failure of a disk or a system
    call on this node is not an error in the data, and is converted to a StorageError, which is
    retried.
    """
    try:
        yield
    except (DataError, SourceUnavailableError, StorageError, TransferError, ImportError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        if _is_of_node(error):
            words = f"could not be read on this node: {error}"
            raise StorageError(f"{printable(location)} {words}") from error
        raise _broken_by(error, location, fault) from error


def _is_of_node(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return isinstance(error, UntrustedFolder) or error.errno not in _OF_DATA
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def _broken_by(error: BaseException, location: str, fault: str) -> DataError:
    words = next(iter(str(error).splitlines()), "")[:MAX_FAULT_CHARS].rstrip(". ")
    name = type(error).__name__
    reason = f"{name}: {words}" if words else name
    return broken(location, f"{fault} ({reason}); correct or replace the data")


def listed(names: Iterable[str]) -> str:
    """Return up to MAX_SHOWN names, separated by commas, and the number of the remaining names."""
    every = list(names)
    shown = ", ".join(shortened(name) for name in every[:MAX_SHOWN])
    return shown if len(every) <= MAX_SHOWN else f"{shown} and {len(every) - MAX_SHOWN:,} more"


def shortened(value: object, limit: int = 60) -> str:
    """Return a value of the data for use in a sentence: in quotes, on one line, and truncated if
    necessary."""
    text = repr(str(value)[: limit + 1])
    return text if len(str(value)) <= limit else f"{text[:limit]}…'"


def no_such_name(what: str, wanted: str, names: Iterable[str]) -> str:
    """Return a sentence stating that no `what` has this name, with the existing names and a
    suggestion."""
    every = list(names)
    folded = {name.casefold(): name for name in every}
    close = difflib.get_close_matches(wanted.casefold(), folded, n=1)
    meant = f"; did you mean {shortened(folded[close[0]])}?" if close else ""
    return f"there is no {what} {shortened(wanted)}, only {listed(every)}{meant}"


class Budget:
    """Limits the bytes that are written while a data set is prepared, so that no archive can fill
    the disk."""

    def __init__(
        self, location: str, limit_bytes: int, setting: str = "DRAY_DATA_CACHE_LIMIT_BYTES"
    ) -> None:
        """setting: name of the setting that determines the limit, for the error message."""
        self._location = location
        self._setting = setting
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes

    def spend_member(self) -> None:
        """Count the minimum disk space of an archive member towards the limit."""
        self.spend(MEMBER_BYTES)

    def spend(self, size_bytes: int) -> None:
        """Count written bytes towards the limit. Raises DataError if the limit is exceeded."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise broken(
                self._location,
                f"the unpacked size exceeds {self._limit_bytes:,} bytes, the limit for a node "
                f"({self._setting})",
            )
