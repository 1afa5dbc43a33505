"""The messages with which data sets are refused, and the distinction of errors in the data."""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

from dray.train.storage_room import StorageError
from ray_workers.datasets.core.types import TransferError
from ray_workers.shared.paths import UntrustedFolder
from ray_workers.training.core.errors import DataError, SourceUnavailableError

MAX_SHOWN = 12
MEMBER_BYTES = 512
MAX_FAULT_CHARS = 300
_OF_DATA = (
    None,  # a library's own OSError, such as Pillow's of a truncated image
    errno.EEXIST,
    errno.EILSEQ,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOMEM,
    errno.ENOTDIR,
    errno.EOVERFLOW,
)
"""System errors about names, offsets and sizes in the data."""
_NO_THREAD = "can't start new thread"
_PANIC = "PanicException"
"""Name of the errors of Rust libraries, which do not derive from Exception."""


def broken(place: str, fault: str) -> DataError:
    """Return a DataError. place: a source, or a source and the line or sample within it."""
    return DataError(f"{printable(place)}: {printable(fault)}")


def printable(text: str) -> str:
    """The text on one line, with escapes for characters that can't be printed. Names come from
    outside and need not be UTF-8."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def reading(place: str, fault: str = "can't be read") -> Iterator[None]:
    """Turn any error that is raised while data are read into a DataError.

    Libraries raise errors of any type (OverflowError, struct.error, KeyError) for unexpected bytes,
    and the same bytes raise the same error again. A failure of a disk or a system call on this node
    is not a fault of the data: it becomes a StorageError, which is retried.
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
            raise StorageError(f"{printable(place)} {words}") from error
        raise _broken_by(error, place, fault) from error


def _is_of_node(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return isinstance(error, UntrustedFolder) or error.errno not in _OF_DATA
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def _broken_by(error: BaseException, place: str, fault: str) -> DataError:
    words = next(iter(str(error).splitlines()), "")[:MAX_FAULT_CHARS].rstrip(". ")
    name = type(error).__name__
    reason = f"{name}: {words}" if words else name
    return broken(place, f"{fault} ({reason}); correct or replace the data")


def listed(names: Iterable[str]) -> str:
    """The names, separated by commas, up to a readable number of them."""
    every = list(names)
    shown = ", ".join(shortened(name) for name in every[:MAX_SHOWN])
    return shown if len(every) <= MAX_SHOWN else f"{shown} and {len(every) - MAX_SHOWN:,} more"


def shortened(value: object, limit: int = 60) -> str:
    """A value of the data for a sentence: in quotes, on one line, and not too long."""
    text = repr(str(value)[: limit + 1])
    return text if len(str(value)) <= limit else f"{text[:limit]}…'"


def no_such_name(what: str, wanted: str, names: Iterable[str]) -> str:
    """A sentence that no `what` has that name, with the existing names and the probable one."""
    every = list(names)
    folded = {name.casefold(): name for name in every}
    close = difflib.get_close_matches(wanted.casefold(), folded, n=1)
    meant = f"; did you mean {shortened(folded[close[0]])}?" if close else ""
    return f"there is no {what} {shortened(wanted)}, only {listed(every)}{meant}"


class Budget:
    """Limits the bytes that preparing a data set writes, so that no archive can fill the disk."""

    def __init__(
        self, place: str, limit_bytes: int, setting: str = "DRAY_DATA_CACHE_LIMIT_BYTES"
    ) -> None:
        """setting: the setting of the limit, for the error."""
        self._place = place
        self._setting = setting
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes

    def spend_member(self) -> None:
        """Spend the disk space of a member of an archive, however small the member is."""
        self.spend(MEMBER_BYTES)

    def spend(self, size_bytes: int) -> None:
        """Raises DataError if more is spent than the limit."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise broken(
                self._place,
                f"unpacked, it needs more than the {self._limit_bytes:,} bytes that are allowed "
                f"on a node ({self._setting})",
            )
