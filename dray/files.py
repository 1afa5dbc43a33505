"""Files by URL, for what training keeps: copied whole or not at all, read by their hash.

A URL of any kind that fsspec knows; it is the worker's, not the client's, so it is imported only
where a URL needs it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

_COPY_BYTES = 1 << 20


class _Writable(Protocol):
    def write(self, data: bytes, /) -> Any: ...


class _Sink:
    def write(self, data: bytes, /) -> None:
        """Take and forget: only the hash is wanted."""


def local_path(url: str) -> Path | None:
    """The path that a `file://` URL or a plain path names; None for any other scheme."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(url) if parts.scheme == "" else None


def measure(path: Path) -> tuple[int, str]:
    """(bytes, sha256) of a file."""
    with path.open("rb") as source:
        return _copy(source, _Sink())


def store(source: Path, url: str) -> tuple[int, str]:
    """Copy a file to a URL so that a reader sees all of it or none; (bytes, sha256)."""
    path = local_path(url)
    if path is None:
        with source.open("rb") as file, _open_remote(url, "wb") as target:
            return _copy(file, target)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with source.open("rb") as file, partial.open("wb") as target:
            copied = _copy(file, target)
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(source, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return copied


def fetch(url: str, target: Path) -> tuple[int, str]:
    """Copy what is at a URL into a file; (bytes, sha256)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _open_remote(url, "rb") as file, target.open("wb") as copy:
        return _copy(file, copy)


def read(url: str) -> bytes:
    """Raises FileNotFoundError if there is no such file."""
    with _open_remote(url, "rb") as file:
        content: bytes = file.read()
    return content


def remove_file(url: str) -> None:
    """Remove a file for good; it may be gone already."""
    path = local_path(url)
    if path is not None:
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            _sync_folder(path.parent)
        return
    filesystem, name = _fsspec(url).core.url_to_fs(url)
    if filesystem.exists(name):
        filesystem.rm_file(name)


def remove_folder(url: str) -> None:
    """Remove a folder and all below it; it may be gone already."""
    path = local_path(url)
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
        return
    filesystem, name = _fsspec(url).core.url_to_fs(url)
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)


def sync_names(url: str) -> None:
    """Return when the names of a folder's files, and its own, are on the disk: a rename or a new
    folder is there only when the folder above is."""
    path = local_path(url)
    if path is not None:
        _sync_folder(path)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_remote(url: str, mode: str) -> Any:
    path = local_path(url)
    return _fsspec(url).open(url, mode) if path is None else path.open(mode)


def _fsspec(url: str) -> Any:
    try:
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise RuntimeError(f"{url} needs the package fsspec, which is absent") from error


def _copy(source: Any, target: _Writable) -> tuple[int, str]:
    """Copy in pieces; (bytes, sha256)."""
    digest = hashlib.sha256()
    size = 0
    while piece := source.read(_COPY_BYTES):
        digest.update(piece)
        target.write(piece)
        size += len(piece)
    return size, digest.hexdigest()
