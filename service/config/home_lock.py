"""The lock on DRAY_HOME, which belongs to one process at a time.

SQLite here has one writer, which alone may checkpoint its write-ahead log; a second service on the
same home would be a second writer. `flock` is held by the open file, so it ends with the process,
however that ends, and is not inherited by programs it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Self

from service.config.start_refusals import StartRefused, reason_of

LOCK_NAME = "lock"


class HomeInUse(StartRefused):
    """Another process holds this home."""


class HomeUnusable(StartRefused):
    """No service can have its home in this folder."""


def write_privately() -> None:
    """From now on this process, and all that it starts, makes files that its user alone may read:
    the home, the database, backups, the embedded Ray with its logs, and what ranks write."""
    os.umask(0o077)


def keep_private(home: Path) -> None:
    """Make the home for this user alone, and close to others one that an older dray left open.

    A folder that users share, such as a temporary one, stays as it is.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = home.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_ISVTX:
        return
    home.chmod(status.st_mode & 0o700)
    make_private(home / "dray.db")


def make_private(database: Path) -> None:
    """Close a SQLite file, and those that SQLite keeps beside it, to other users."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another user's to close
            Path(f"{database}{suffix}").chmod(0o600)


class HomeLock:
    """Held from `acquire` to `release`; also a context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, home: Path) -> Self:
        """Take the home, making it if need be.

        HomeInUse if another process has it, HomeUnusable if nothing can be written there.
        """
        try:
            return cls._acquire(home)
        except OSError as error:
            raise HomeUnusable(
                f"the home {home} {reason_of(error)}: correct that, or set DRAY_HOME to another "
                "folder"
            ) from error

    @classmethod
    def _acquire(cls, home: Path) -> Self:
        keep_private(home)
        path = home / LOCK_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 64).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise HomeInUse(
                f"{home} is in use by the dray service with process id {holder}: stop that one, "
                "or set DRAY_HOME to another folder"
            ) from None
        lock = cls(fd)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError:  # no room for it
            lock.release()
            raise
        return lock

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
