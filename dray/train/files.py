"""Reads and writes files by URL. Local writes are atomic, and copies return a hash.

All URLs that fsspec supports are allowed. fsspec is a dependency of the workers, not of the client,
so it is imported only for URLs that need it.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from dray.train.call_lock import CallLock
from dray.train.storage_faults import StorageError

_COPY_BYTES = 1 << 20


class _Writable(Protocol):
    def write(self, data: bytes, /) -> Any: ...


def local_path(url: str) -> Path | None:
    """Return the path of a `file://` URL or a plain path; None for any other scheme."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(url) if parts.scheme == "" else None


def measure(path: Path) -> tuple[int, str]:
    """Return (size in bytes, SHA-256) of a file."""
    with path.open("rb", buffering=0) as source:
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        return source.tell(), sha256


def store(source: Path, url: str) -> tuple[int, str]:
    """Copy a file to a URL, atomically if the URL is local; returns (size in bytes, SHA-256).

    Raises StorageError if the storage fails.
    """
    path = local_path(url)
    with source.open("rb") as file:
        try:
            if path is not None:
                return _store_local(file, path)
            if _is_asked_for():
                size, sha256 = _ask("store", url, source)
                return size, sha256
            with _open_remote(url, "wb") as target:
                return _copy(file, target)
        except ImportError:
            raise
        except Exception as error:  # storage clients raise many types
            raise StorageError(f"{url} can't be written: {error}") from error


def _store_local(file: Any, path: Path) -> tuple[int, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as target:
            copied = _copy(file, target)
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(file.name, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return copied


def fetch(url: str, target: Path) -> tuple[int, str]:
    """Copy the file at a URL to `target`; returns (size in bytes, SHA-256)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if local_path(url) is None and _is_asked_for():
        size, sha256 = _ask("fetch", url, target)
        return size, sha256
    with _open_remote(url, "rb") as file, target.open("wb") as copy:
        return _copy(file, copy)


def read(url: str) -> bytes:
    """Return the content of a file. Raises FileNotFoundError if the file does not exist."""
    if local_path(url) is None and _is_asked_for():
        with tempfile.TemporaryDirectory(prefix="dray-read-") as folder:
            fetch(url, copy := Path(folder, "file"))
            return copy.read_bytes()
    with _open_remote(url, "rb") as file:
        content: bytes = file.read()
    return content


def remove_file(url: str) -> None:
    """Remove a file if it exists."""
    path = local_path(url)
    if path is not None:
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            _sync_folder(path.parent)
        return
    if _is_asked_for():
        _ask("remove_file", url)
        return
    filesystem, name = _fsspec(url).core.url_to_fs(url)
    if filesystem.exists(name):
        filesystem.rm_file(name)


def remove_folder(url: str) -> None:
    """Remove a folder and its content if it exists."""
    path = local_path(url)
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
        return
    if _is_asked_for():
        _ask("remove_folder", url)
        return
    filesystem, name = _fsspec(url).core.url_to_fs(url)
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)


def sync_names(url: str) -> None:
    """Sync a folder and its parent, so that renames and new folders are durable."""
    path = local_path(url)
    if path is not None:
        _sync_folder(path)
        _sync_folder(path.parent)


# If storage requires the node's credentials, scripts access it through another process.

_asking = CallLock()
_numbers = itertools.count(1)
_answers: BinaryIO | None = None


def _is_asked_for() -> bool:
    return "DRAY_STORAGE_FD" in os.environ


def _ask(op: str, url: str, path: Path | None = None) -> Any:
    """Have the process at the other end of the socket perform the operation
    (`ray_workers.node.folders.storage_access`)."""
    global _answers
    owner = os.environ.get("DRAY_SPOOL_PID", str(os.getpid()))
    if owner != str(os.getpid()):
        raise OSError(f"{url} can be accessed only by the training process, not by its children")
    fd = int(os.environ["DRAY_STORAGE_FD"])
    number = next(_numbers)
    request = {"op": op, "url": url, "path": path and str(path.absolute())}
    with _asking:
        left = json.dumps([number, request]).encode() + b"\n"
        while left:
            left = left[os.write(fd, left) :]
        _answers = _answers or os.fdopen(fd, "rb", closefd=False)
        answered = 0
        while answered != number:  # skip answers to calls that a signal handler interrupted
            if not (line := _answers.readline()):
                raise StorageError(f"{url}: the process that accesses the storage has exited")
            answered, answer = json.loads(line)
    if "missing" in answer:
        raise FileNotFoundError(answer["missing"])
    if "error" in answer:
        raise StorageError(answer["error"])
    return answer["done"]


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
        raise ImportError(f"{url} needs the package fsspec, which is not installed") from error


def _copy(source: Any, target: _Writable) -> tuple[int, str]:
    """Copy in pieces; returns (size in bytes, SHA-256)."""
    digest = hashlib.sha256()
    size = 0
    while piece := source.read(_COPY_BYTES):
        digest.update(piece)
        target.write(piece)
        size += len(piece)
    return size, digest.hexdigest()
