"""The storage of logs, checkpoints and artifacts: a folder, or an fsspec file system.

A *key* is a relative path with `/` between its parts. The first two parts of a key name its owner,
as in `jobs/ID`. A key, or a URL that a rank reports, can't refer to a file outside the storage or
outside its owner's folder. Parts such as `..` are refused. If the storage is a folder, links are
resolved before the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import (
    EACCES,
    EEXIST,
    EIO,
    EISDIR,
    ELOOP,
    ENAMETOOLONG,
    ENOENT,
    ENOTDIR,
    ENOTEMPTY,
    EPERM,
)
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import fsspec

from dray.input.names import unfit
from service.domain.errors import FolderSpoilt, StorageUnavailable

OF_THE_PATH = frozenset(
    {EACCES, EEXIST, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENOTEMPTY, EPERM}
)
"""Errors caused by files and permissions at an object's own path, as opposed to storage that is
full, failing or unmounted (ENOSPC, EDQUOT, EIO, ESTALE, EROFS)."""
P = ParamSpec("P")
T = TypeVar("T")

THREADS = 16
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dray-storage")


class BadKey(ValueError):
    """The key, or a link in its path, leads out of its owner's folder, or contains unprintable
    characters."""


def check_key(key: str) -> str:
    """Return the key. Raises BadKey unless the key is a plain relative path."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise BadKey(f"{key!r} is not a plain relative path")
    return key


def check_file_name(name: str) -> str:
    """Return a file path that a job reported. Raises BadKey if the path contains unprintable
    characters."""
    if (found := unfit(check_key(name))) is not None:
        raise BadKey(f"{name!r} has {found}")
    return name


class Storage:
    """The storage at a URL. All methods block, so call them in a thread. They are thread-safe."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        filesystem, root = fsspec.core.url_to_fs(self.url)
        self._fs: Any = filesystem
        self._root = str(root).rstrip("/")
        self._folder = Path(self._root) if "file" in _protocols(filesystem) else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder = self._folder.resolve()

    @property
    def folder(self) -> Path | None:
        """The storage's folder; None if the storage is not a folder."""
        return self._folder

    def url_of(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def key_of(self, url: str) -> str:
        """Return the key of a URL. Raises BadKey if the URL is not in this storage."""
        prefix = f"{self.url}/"
        if not url.startswith(prefix):
            raise BadKey(f"{url!r} is not in this storage")
        return check_key(url.removeprefix(prefix).rstrip("/"))

    def local_path(self, key: str) -> Path | None:
        """Return the file's path, with links resolved; None if the storage is not a folder."""
        if self._folder is None:
            return None
        try:
            path = (self._folder / check_key(key)).resolve()
        except (OSError, RuntimeError) as error:  # a link to itself, a name that is too long
            raise BadKey(f"{key!r} can't be resolved") from error
        owner = self._folder.joinpath(*key.split("/")[:2])
        if not path.is_relative_to(owner):
            raise BadKey(f"{key!r} is outside its owner's folder in the storage")
        return path

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write or replace an object atomically. If the storage is a folder, the object survives a
        power failure.

        Raises FolderSpoilt if the storage accepts files, but not at this key.
        """
        try:
            path = self.local_path(key)
        except BadKey as error:
            raise FolderSpoilt(f"{key} can't be written: its path contains a link") from error
        try:
            if path is None:
                remote = self._remote(key)
                with _reaching():
                    self._fs.pipe_file(remote, data)
            else:
                _write_atomically(path, data)
        except OSError as error:
            is_spoilt = error.errno in OF_THE_PATH and self.accepts_files_near(key)
            raise (FolderSpoilt if is_spoilt else StorageUnavailable)(
                f"{key} can't be written to the storage: {_why(error)}"
            ) from error

    def accepts_files_near(self, key: str) -> bool:
        """Whether a file can be written to the parent folder of the owners' folders. False if the
        storage is not a folder."""
        if self._folder is None:
            return False
        try:
            with tempfile.TemporaryFile(dir=self._folder / key.split("/")[0]) as file:
                file.write(b"\0")
        except OSError:
            return False
        return True

    def read_bytes(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes from `start` up to `end`. Raises FileNotFoundError if the object does not
        exist, and FolderSpoilt if the storage works but this object can't be read."""
        path = self.local_path(key)
        try:
            if path is None:
                remote = self._remote(key)
                with _reaching():
                    data: bytes = self._fs.cat_file(remote, start=start, end=end)
                return data
            with _open_file(path) as file:
                file.seek(start)
                return file.read() if end is None else file.read(max(0, end - start))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(str(error)) from error
        except OSError as error:
            is_spoilt = error.errno in OF_THE_PATH and self.accepts_files_near(key)
            raise (FolderSpoilt if is_spoilt else StorageUnavailable)(
                f"{key} can't be read from the storage: {_why(error)}"
            ) from error

    def size_bytes(self, key: str) -> int:
        """Return the size of the object. Raises FileNotFoundError if the object does not exist."""
        path = self.local_path(key)
        try:
            if path is None:
                remote = self._remote(key)
                with _reaching():
                    return int(self._fs.size(remote))
            return path.stat().st_size
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageUnavailable(
                f"{key} can't be read from the storage: {_why(error)}"
            ) from error

    def names(self, key: str) -> list[str]:
        """Return the names directly below the key, sorted; empty if the key does not exist."""
        path = self.local_path(key)
        try:
            if path is not None:
                return sorted(entry.name for entry in path.iterdir())
            remote = self._remote(key)
            with _reaching():
                self._fs.invalidate_cache()  # ranks write with their own clients
                found = self._fs.ls(remote, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageUnavailable(
                f"{key} can't be listed in the storage: {_why(error)}"
            ) from error
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def delete_tree(self, key: str) -> None:
        """Delete everything under the key, if it exists."""
        if self._folder is not None:
            path = self._folder / check_key(key)
            try:
                _delete(path)
            except OSError as error:
                raise StorageUnavailable(
                    f"{key} can't be deleted from the storage: {_why(error)}"
                ) from error
            return
        remote = self._remote(key)
        try:
            with _reaching():
                if self._fs.exists(remote):
                    self._fs.rm(remote, recursive=True)
        except OSError as error:
            raise StorageUnavailable(
                f"{key} can't be deleted from the storage: {_why(error)}"
            ) from error

    def _remote(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        try:
            shutil.rmtree(path)
        except PermissionError:
            _allow_deletion(path)
            shutil.rmtree(path)


def _allow_deletion(path: Path) -> None:
    """Make folders below a path writable, in case a script made them read-only. Don't follow
    links."""
    _make_writable(path)
    for at, names, _ in os.walk(path):
        for name in names:
            _make_writable(Path(at, name))


def _make_writable(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a link, or another user's folder: deletion will fail
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            Path(f"/proc/self/fd/{descriptor}").chmod(0o700)
        finally:
            os.close(descriptor)


def _why(error: OSError) -> str:
    """Return the error message without paths and addresses, since callers of the API must not see
    them."""
    return error.strerror or type(error).__name__


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Convert errors of an object store's client to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(EIO, f"the object store failed ({type(error).__name__})") from error


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _open_file(path: Path) -> BinaryIO:
    """Open a regular file. Raises FileNotFoundError for anything else, because a pipe could
    block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


async def in_storage_thread(work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but with a separate thread pool for storage calls."""
    call = partial(work, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
