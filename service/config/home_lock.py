"""The lock on DRAY_HOME, which ensures that only one service uses the home at a time.

The SQLite database must have a single writer, which is also the only process that checkpoints the
write-ahead log. A second service on the same home would be a second writer. The lock is an `flock`,
which belongs to the open file. Therefore, the lock is always released when the process ends, and
programs that the process starts don't inherit it.
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
    """Raised if another process is using the home directory."""


class HomeUnusable(StartRefused):
    """Raised if the folder can't be used as a home."""


def write_privately() -> None:
    """Make this process and its children, such as the embedded Ray, create only private files."""
    os.umask(0o077)


def keep_private(home: Path) -> None:
    """Create the home as a private folder, or, if it exists, remove other users' access to it.

    A folder that users share, such as `/tmp`, is not changed.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = home.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_ISVTX:
        return
    home.chmod(status.st_mode & 0o700)
    make_private(home / "dray.db")


def make_private(database: Path) -> None:
    """Make a SQLite file, and the files that SQLite creates next to it, private to this user."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another user's file
            Path(f"{database}{suffix}").chmod(0o600)


class HomeLock:
    """A lock that is held from `acquire` until `release`. Can be used as a context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, home: Path) -> Self:
        """Lock the home, and create it if necessary. Raises HomeInUse or HomeUnusable."""
        try:
            return cls._acquire(home)
        except OSError as error:
            raise HomeUnusable(
                f"the home {home} {reason_of(error)}: fix this, or set DRAY_HOME to another folder"
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
                f"{home} is in use by the dray service with process id {holder}: stop this "
                "process, or set DRAY_HOME to another folder"
            ) from None
        lock = cls(fd)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError:  # the disk is full
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
