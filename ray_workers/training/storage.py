"""Whole files by URL: a reader sees all of a file or none of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import fsspec

from dray.train import local_path


class HashingFile:
    """Passes writes on, and knows their size and sha256 in the end."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._target.write(data)
        size = memoryview(data).nbytes
        self.size_bytes += size
        return size

    def flush(self) -> None:
        self._target.flush()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def write(url: str, fill: Callable[[HashingFile], object]) -> tuple[int, str]:
    """Write what `fill` writes; (bytes, sha256). On a file system: temporary name, fsync, rename;
    an object store shows an object when its upload is complete."""
    path = local_path(url)
    if path is None:
        with fsspec.open(url, "wb") as target:
            file = HashingFile(target)
            fill(file)
        return file.size_bytes, file.sha256
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as target:
            file = HashingFile(target)
            fill(file)
            target.flush()
            os.fsync(target.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return file.size_bytes, file.sha256


def read(url: str) -> bytes:
    """Raises FileNotFoundError if there is no such file."""
    path = local_path(url)
    if path is not None:
        return path.read_bytes()
    with fsspec.open(url, "rb") as source:
        return cast(bytes, source.read())


def folders(url: str) -> list[str]:
    """The folders directly below a URL, by name; none if there is no such folder."""
    base = url.rstrip("/")
    path = local_path(url)
    if path is not None:
        found = [entry.name for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
    else:
        filesystem, name = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        there = filesystem.ls(name, detail=True) if filesystem.exists(name) else []
        found = [
            entry["name"].rstrip("/").rsplit("/", 1)[-1]
            for entry in there
            if entry["type"] == "directory"
        ]
    return [f"{base}/{name}" for name in sorted(found)]


def remove_file(url: str) -> None:
    """Remove a file for good; it may be gone already."""
    path = local_path(url)
    if path is not None:
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            _sync_folder(path.parent)
        return
    filesystem, name = fsspec.core.url_to_fs(url)
    if filesystem.exists(name):
        filesystem.rm_file(name)


def remove_folder(url: str) -> None:
    """Remove a folder and all below it; it may be gone already."""
    path = local_path(url)
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
        return
    filesystem, name = fsspec.core.url_to_fs(url)
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)


def _sync_folder(path: Path) -> None:
    """A rename is on disk only when its folder is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
