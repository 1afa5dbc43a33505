"""DRAY_HOME belongs to one process at a time.

SQLite here has one writer, which alone may checkpoint its write-ahead log; a second service on the
same home would be a second writer. `flock` is held by the open file, so it ends with the process,
however that ends, and is not inherited by programs it starts.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

LOCK_NAME = "lock"


class HomeInUse(Exception):
    """Another process holds this home."""


class HomeLock:
    """Held from `acquire` to `release`; also a context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, home: Path) -> Self:
        """Take the home, making it if need be; HomeInUse if another process has it."""
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return cls(fd)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
