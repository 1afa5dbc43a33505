"""Bytes by URL: logs, checkpoints and artifacts, on a folder or on what fsspec reaches.

A *key* is a relative path with `/` between its parts; the first two name its owner, as in
`jobs/ID`. Keys, and URLs that ranks report, can't lead out of the storage, nor from one owner's
folder to another's: parts like `..` are refused, and on a folder links are followed first.
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
"""Errors that files and permissions at an object's own path cause. Those of a full, failing or
unmounted storage (ENOSPC, EDQUOT, EIO, ESTALE, EROFS) are not among them."""
P = ParamSpec("P")
T = TypeVar("T")

THREADS = 16
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dray-storage")


class BadKey(ValueError):
    """The key, or a link on its way, leads out of its place in the storage or can't be shown."""


def check_key(key: str) -> str:
    """The key itself if it is a plain relative path; BadKey otherwise."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise BadKey(f"{key!r} is not a plain relative path")
    return key


def check_file_name(name: str) -> str:
    """A file's path as a job reports it, if people can be shown it; BadKey otherwise."""
    if (found := unfit(check_key(name))) is not None:
        raise BadKey(f"{name!r} has {found}")
    return name


class Storage:
    """One storage URL. Blocking: call it in a thread. All methods may be called from any."""

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
        """The folder that this is; None for other storages."""
        return self._folder

    def url_of(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def key_of(self, url: str) -> str:
        """The key that a URL of this storage names; BadKey if it is of another place."""
        prefix = f"{self.url}/"
        if not url.startswith(prefix):
            raise BadKey(f"{url!r} is not in this storage")
        return check_key(url.removeprefix(prefix).rstrip("/"))

    def local_path(self, key: str) -> Path | None:
        """Path of the file if this is a folder, links followed; None for other storages."""
        if self._folder is None:
            return None
        try:
            path = (self._folder / check_key(key)).resolve()
        except (OSError, RuntimeError) as error:  # a link that leads to itself, a name too long
            raise BadKey(f"{key!r} leads nowhere") from error
        owner = self._folder.joinpath(*key.split("/")[:2])
        if not path.is_relative_to(owner):
            raise BadKey(f"{key!r} leads out of its place in the storage")
        return path

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write all of it or nothing, over what was there; on a folder it outlives a power cut.

        FolderSpoilt if the storage takes files, but not at this key.
        """
        try:
            path = self.local_path(key)
        except BadKey as error:
            raise FolderSpoilt(f"{key} can't be written: a link is in its way") from error
        try:
            if path is None:
                remote = self._remote(key)
                with _reaching():
                    self._fs.pipe_file(remote, data)
            else:
                _write_atomically(path, data)
        except OSError as error:
            is_spoilt = error.errno in OF_THE_PATH and self.takes_files_beside(key)
            raise (FolderSpoilt if is_spoilt else StorageUnavailable)(
                f"{key} can't be written to the storage: {_why(error)}"
            ) from error

    def takes_files_beside(self, key: str) -> bool:
        """Whether the folder of all owners takes a file; false of a storage that is no folder."""
        if self._folder is None:
            return False
        try:
            with tempfile.TemporaryFile(dir=self._folder / key.split("/")[0]) as file:
                file.write(b"\0")
        except OSError:
            return False
        return True

    def read_bytes(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes `start` up to `end`. FileNotFoundError if there is no such object; FolderSpoilt if
        it can't be read and others can."""
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
            is_spoilt = error.errno in OF_THE_PATH and self.takes_files_beside(key)
            raise (FolderSpoilt if is_spoilt else StorageUnavailable)(
                f"{key} can't be read from the storage: {_why(error)}"
            ) from error

    def size_bytes(self, key: str) -> int:
        """Size of the object. FileNotFoundError if there is none."""
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
        """The names directly below the key, sorted; none if there is nothing."""
        path = self.local_path(key)
        try:
            if path is not None:
                return sorted(entry.name for entry in path.iterdir())
            remote = self._remote(key)
            with _reaching():
                self._fs.invalidate_cache()  # ranks write through clients of their own
                found = self._fs.ls(remote, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageUnavailable(
                f"{key} can't be listed in the storage: {_why(error)}"
            ) from error
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def delete_tree(self, key: str) -> None:
        """Delete everything under the key, if there is anything."""
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
    """Give back the permissions that a script has taken from folders below a path; no link is
    followed."""
    _make_writable(path)
    for at, names, _ in os.walk(path):
        for name in names:
            _make_writable(Path(at, name))


def _make_writable(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a link, or another user's: the deletion says so
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            Path(f"/proc/self/fd/{descriptor}").chmod(0o700)
        finally:
            os.close(descriptor)


def _why(error: OSError) -> str:
    """The error without paths and addresses, which a caller of the API must not see."""
    return error.strerror or type(error).__name__


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Raise errors of an object store's client as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(EIO, f"the object store fails ({type(error).__name__})") from error


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _open_file(path: Path) -> BinaryIO:
    """FileNotFoundError for anything but a file: a pipe in its place would never answer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is no file")
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
    """The result of `work`, which reads or writes the storage. As `asyncio.to_thread`, whose few
    threads also parse bodies, start Ray and compute forecasts."""
    call = partial(work, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
