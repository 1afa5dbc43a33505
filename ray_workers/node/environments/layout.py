"""The files of an environment's folder that builders, readers and removal share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

CACHE = ".cache"
LOG_CHARS = 8000
"""The end of the log that a node's answer holds."""


def failed_log(root: Path, key: str) -> Path:
    return root / f"{key}.log"


def log_of(root: Path, key: str) -> str:
    return tail(failed_log(root, key))


def tail(path: Path, most: int = LOG_CHARS) -> str:
    try:
        with open(path, "rb", opener=open_at_once) as file:
            return end_of(file, most)
    except OSError:
        return ""


def end_of(file: BinaryIO, most: int) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - most))
    return file.read().decode(errors="replace").strip()


def append(log: Path, text: str) -> None:
    """Add a line; nothing if a setup command has put something else in the log's place."""
    with contextlib.suppress(OSError), open(log, "a", opener=open_at_once) as file:
        file.write(f"{text}\n")


def open_at_once(path: str, flags: int) -> int:
    """An opener that follows no link, and waits for nobody at the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder, each counted once; files may go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total
