"""A node's data cache, which is addressed by content and shared by all jobs. The entries that were
used least recently are evicted first.

    locks/      one file for each source, locked while the source is fetched or prepared
    index/      maps a source and its version to the hashes of its content
    objects/    fetched files, by their SHA-256
    prepared/   folders of numpy files, by a hash of their origin and preparation
    scratch/    unfinished entries

Locks use `flock`, so the kernel releases them when a process dies. A process that uses an entry
holds a shared lock on it, so that the entry is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ray_workers.shared.node_needs import DataPolicy
from ray_workers.shared.paths import machine_root, own_folder

Kind = Literal["objects", "prepared"]
INDEX_KEPT_S = 90 * 86_400

_held: dict[Path, int] = {}
"""Maps each entry that this process uses to the descriptor that holds its lock."""


class NodeCache:
    """The cache of a node. Several processes can use the cache at the same time."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        for name in ("locks", "index", "objects", "prepared", "scratch"):
            # If users share the root, another user could have placed data in it.
            own_folder(root / name, "DRAY_DATA_CACHE_DIR")

    @classmethod
    def of(cls, policy: DataPolicy) -> NodeCache:
        root = Path(policy.cache_dir) if policy.cache_dir else machine_root() / "data"
        return cls(root, policy.cache_limit_bytes)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Acquire the lock of a source, and wait if necessary. Only one process on the node can
        hold the lock at a time."""
        path = self.root / "locks" / _digest(name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def hold(self, kind: Kind, key: str) -> Path | None:
        """Return the entry, or None if it does not exist. An existing entry is not removed until
        this process releases it or ends."""
        path = self.root / kind / key
        if path in _held:
            return path
        fd = _open_locked(path, fcntl.LOCK_SH)
        if fd is None:
            return None
        os.utime(path)
        _held[path] = fd
        return path

    def add(self, kind: Kind, key: str, made: Path) -> Path:
        """Move an entry from a scratch folder into the cache, and hold it."""
        path = self.root / kind / key
        existing = self.hold(kind, key)
        if existing is not None:  # added from another source with the same content
            return existing
        fd = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            made.rename(path)
        except OSError:
            os.close(fd)
            existing = self.hold(kind, key)  # another process added the same content
            if existing is None:
                raise
            return existing
        _held[path] = fd
        return path

    def release(self, path: Path) -> None:
        fd = _held.pop(path, None)
        if fd is not None:
            os.close(fd)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Create a temporary folder. If this process dies, a later sweep removes the folder."""
        path = self.root / "scratch" / secrets.token_hex(8)
        path.mkdir(mode=0o700)
        fd = _open_locked(path, fcntl.LOCK_SH)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            if fd is not None:
                os.close(fd)

    def remembered(self, name: str) -> Any | None:
        """Return the JSON data that `remember` stored for a source and version, or None."""
        path = self.root / "index" / _digest(name)
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        os.utime(path)
        return found

    def remember(self, name: str, value: Any) -> None:
        path = self.root / "index" / _digest(name)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        temporary.write_text(json.dumps(value))
        temporary.replace(path)

    def sweep(self, free_bytes: int = 0) -> None:
        """Remove the least recently used entries until `free_bytes` are available within the limit,
        or all remaining entries are in use. Also remove the scratch folders of dead processes."""
        with contextlib.suppress(BlockingIOError), self._sweeping():
            for path in (self.root / "scratch").iterdir():
                _remove_if_idle(path)
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries) + free_bytes
            for _, size, path in entries:
                if total <= self.limit_bytes:
                    break
                if _remove_if_idle(path):
                    total -= size
            forgotten = time.time() - INDEX_KEPT_S
            for path in (self.root / "index").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < forgotten:
                        path.unlink()

    @contextlib.contextmanager
    def _sweeping(self) -> Iterator[None]:
        fd = os.open(self.root / "locks" / "sweep", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last used, bytes, path) of every entry."""
        for kind in ("objects", "prepared"):
            for path in (self.root / kind).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    size = status.st_size
                    if path.is_dir():
                        size = sum(part.stat().st_size for part in path.iterdir())
                    yield status.st_mtime, size, path


def _open_locked(path: Path, how: int) -> int | None:
    """Return a descriptor that holds a lock on the file or folder at `path`. None if the path no
    longer exists, or if the path is in use and `how` contains LOCK_NB."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, how)
        # The entry might have been removed or replaced while this process waited for the lock.
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _remove_if_idle(path: Path) -> bool:
    fd = _open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if fd is None:
        return False
    try:
        if path.is_dir():
            # Rename the entry first, so that no process finds a partially deleted entry.
            doomed = path.parent.parent / "scratch" / f"{path.name}.{secrets.token_hex(4)}"
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    return True


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
