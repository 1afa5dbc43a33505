"""Writes buffers to the files at given URLs, bypassing the page cache if that is faster. Readers
see either the complete file or no file. Other file operations are in `dray.train.files`."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

import fsspec

from dray.train import files
from dray.train.files import local_path

CHUNK_BYTES = 16 << 20
"""Number of bytes that are hashed and written at a time. After each chunk, the rank shows that it
is alive."""
DIRECT_FROM_BYTES = 8 << 20
"""Smaller files are written through the page cache."""
DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag for writing from memory to the disk without an extra copy in the page cache."""


def write_buffer(
    url: str, data: memoryview, num_bytes: int, wrote: Callable[[], None] = lambda: None
) -> str:
    """Write the first `num_bytes` of `data`, and return their SHA-256. On a file system, this
    writes a temporary file, calls fsync, and renames the file; the caller must call
    `files.sync_names`. In an object store, an object becomes visible when its upload is complete.
    `wrote` is called after each chunk.

    Whole memory pages bypass the page cache if the file system supports this; the last page can
    extend beyond `num_bytes`. Raises OSError, without leaving a partial file on a file system.
    """
    path = local_path(url)
    if path is None:
        digest = hashlib.sha256()
        with fsspec.open(url, "wb") as target:
            for at in range(0, num_bytes, CHUNK_BYTES):
                chunk = data[at : min(at + CHUNK_BYTES, num_bytes)]
                digest.update(chunk)
                target.write(chunk)
                wrote()
        return digest.hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        sha256 = _write_local(partial, data, num_bytes, wrote)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return sha256


def _write_local(path: Path, data: memoryview, num_bytes: int, wrote: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    fd = _open_direct(path) if len(data) >= DIRECT_FROM_BYTES else _open(path, 0)
    try:
        for at in range(0, num_bytes, CHUNK_BYTES):
            digest.update(data[at : min(at + CHUNK_BYTES, num_bytes)])
            _write_all(fd, data[at : at + CHUNK_BYTES])
            is_last = at + CHUNK_BYTES >= num_bytes
            if not is_last and not fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT:
                os.fsync(fd)  # a single fsync at the end could take minutes
            wrote()
        os.ftruncate(fd, num_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _open_direct(path: Path) -> int:
    try:
        return _open(path, DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _open(path, 0)  # the file system does not support O_DIRECT


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)


def _write_all(fd: int, chunk: memoryview) -> None:
    """Write all bytes. If the file system rejects a direct write, continue through the page
    cache."""
    while chunk:
        try:
            chunk = chunk[os.write(fd, chunk) :]
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~DIRECT)


def read_range(url: str, start: int, num_bytes: int) -> bytes:
    """Return a part of an object; fewer bytes if the object ends earlier."""
    filesystem, name = fsspec.core.url_to_fs(url)
    content: bytes = filesystem.cat_file(name, start=start, end=start + num_bytes)
    return content


def measure(url: str) -> tuple[int, str]:
    """Return (size in bytes, SHA-256) of a file, without holding its content in memory."""
    path = local_path(url)
    if path is not None:
        return files.measure(path)
    digest, num_bytes = hashlib.sha256(), 0
    with fsspec.open(url, "rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return num_bytes, digest.hexdigest()


def keep_only(url: str, names: Collection[str]) -> None:
    """Delete all files in a folder except the files with the given names."""
    path = local_path(url)
    if path is not None:
        for other in path.iterdir():
            if other.name not in names:
                other.unlink(missing_ok=True)
        return
    filesystem, folder = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    for other in filesystem.ls(folder, detail=False):
        if other.rpartition("/")[2] not in names:
            filesystem.rm_file(other)


def exists(url: str) -> bool:
    path = local_path(url)
    if path is not None:
        return path.exists()
    filesystem, name = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()  # another process may have written the file
    return bool(filesystem.exists(name))


def folders(url: str) -> list[str]:
    """Return the folders directly below a URL, sorted by name; empty if the URL does not exist."""
    base = url.rstrip("/")
    path = local_path(url)
    if path is not None:
        found = [entry.name for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
    else:
        filesystem, name = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        entries = filesystem.ls(name, detail=True) if filesystem.exists(name) else []
        found = [
            entry["name"].rstrip("/").rsplit("/", 1)[-1]
            for entry in entries
            if entry["type"] == "directory"
        ]
    return [f"{base}/{name}" for name in sorted(found)]
