"""Caches copies of code on a node. Code is fetched and verified once, and restored at each start of
a job.

A copy is named after the hash of its manifest or of its origin. Each attempt of a job finds the
same bytes in the job's working directory, even if an earlier attempt changed them. Other files in
the directory are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.code.manifest import MAX_FILES, PART_BYTES, collision_in, fault_of
from dray.train import files
from ray_workers.node.folders import remote_code
from ray_workers.shared.folders.removal import remove_tree
from ray_workers.shared.node_needs import CodeRef, RemoteCodeRef
from ray_workers.shared.paths import entries, own_folder
from ray_workers.shared.processes.procfs import boot_id

LIMIT_BYTES = 4 << 30
"""Maximum total size of all copies on a machine. The most recently used copies are kept."""
SCRATCH_S = 3600.0
"""Seconds after which an unfinished copy is removed."""
_SCRATCH = ".new-"
_FILES = "files"
"""Name of the folder with the files of a copy."""
_SIZE = "size"
"""Name of the file that contains a copy's size on disk, in bytes."""
_BLOCK = 4096


class BadCode(Exception):
    """Raised if the bytes in the storage differ from the bytes that were uploaded."""


@dataclass(frozen=True)
class _Part:
    pack: str
    start: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class _File:
    path: str
    is_executable: bool
    parts: tuple[_Part, ...]


class CodeCache:
    """The copies of code on one machine. Several processes can use the cache at the same time.
    Methods block."""

    def __init__(self, root: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._root = root
        self._limit_bytes = limit_bytes

    def put_into(self, code: CodeRef, storage_url: str, directory: Path) -> None:
        """Restore the files of this code in a directory to their uploaded contents.

        Raises BadCode if the files in the storage differ from the upload, and OSError if the
        storage can't be read or a disk is full.
        """
        own_folder(self._root)
        copy = self._copy_of(code.manifest_sha256)
        if not copy.is_dir():
            # Don't hold the copy's lock during the download: storage may be slow, and other jobs
            # wait for this lock.
            with self._locked(copy, "fetch-"):
                if not copy.is_dir():
                    self._evict()
                    self._fetch(code, storage_url, copy)
        with self._locked(copy):
            _put_copy(copy, directory)

    def put_remote_into(self, code: RemoteCodeRef, directory: Path) -> None:
        """Like `put_into`, for code that was not uploaded.

        Raises CodeRefused, CodeUnreachable (`ray_workers.node.folders.remote_code.fetch`), OSError.
        """
        self.fetch_remote(code)
        copy = self._copy_of(code.digest)
        with self._locked(copy):
            _put_copy(copy, directory)

    def fetch_remote(
        self, code: RemoteCodeRef, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Fetch the copy that `put_remote_into` needs. Raises the same errors as `put_remote_into`,
        and Abandoned once `is_wanted` returns False."""
        own_folder(self._root)
        copy = self._copy_of(code.digest)
        if copy.is_dir():
            os.utime(copy)
            return
        self._evict()
        # Don't hold the lock during the download: the server may be slow, and downloads of other
        # code share the lock.
        self._fetch_remote(code, copy, is_wanted)

    def has(self, digest: str) -> bool:
        """Whether a copy exists."""
        return self._copy_of(digest).is_dir()

    def files_of(self, digest: str) -> Path | None:
        """Return the folder with the files of the copy; None if there is no copy."""
        files_ = self._copy_of(digest) / _FILES
        return files_ if files_.is_dir() else None

    def _copy_of(self, digest: str) -> Path:
        # Don't use copies made before this boot, because a power cut may have emptied their files.
        return self._root / f"{digest}-{boot_id()}"

    @contextlib.contextmanager
    def _locked(self, copy: Path, kind: str = "") -> Iterator[None]:
        """Hold a lock on this copy. The lock is released when the process ends."""
        with self._lock_of(copy.name, kind).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock_of(self, name: str, kind: str = "") -> Path:
        """Return one of sixteen lock files. The number of lock files is fixed, so that it doesn't
        grow with every upload."""
        return self._root / f".lock-{kind}{name[0]}"

    def _fetch(self, code: CodeRef, storage_url: str, copy: Path) -> None:
        """Fetch code into a temporary folder, which is renamed once it is complete."""
        text = files.read(code.manifest_url)
        if hashlib.sha256(text).hexdigest() != code.manifest_sha256:
            raise BadCode(f"the manifest of {code.id} in the storage differs from the upload")
        found = _parse(text)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self._root))
        try:
            whole = scratch / "whole"
            (whole / _FILES).mkdir(parents=True)
            packs = sorted({part.pack for file in found for part in file.parts})
            local = {
                pack: _local_pack(f"{storage_url.rstrip('/')}/{pack}", scratch / f"pack-{number}")
                for number, pack in enumerate(packs)
            }
            size = 0
            for file in found:
                size += -(-_write(file, local, whole / _FILES / file.path) // _BLOCK) * _BLOCK
            (whole / _SIZE).write_text(str(size))
            whole.rename(copy)
        finally:
            remove_tree(scratch)

    def _fetch_remote(self, code: RemoteCodeRef, copy: Path, is_wanted: Callable[[], bool]) -> None:
        """Like `_fetch`. If another process completes its copy first, that copy is kept."""
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self._root))
        try:
            whole = scratch / "whole"
            (whole / _FILES).mkdir(parents=True)
            size = remote_code.fetch_apart(code, whole / _FILES, scratch, is_wanted)
            (whole / _SIZE).write_text(str(size))
            try:
                whole.rename(copy)
            except OSError:
                if not copy.is_dir():
                    raise
        finally:
            remove_tree(scratch)

    def _evict(self) -> None:
        """Remove the least recently used copies beyond the limit, and unfinished copies of dead
        processes."""
        found = entries(self._root)
        for path in found:
            if path.name.startswith(_SCRATCH) and time.time() - _used_at(path) > SCRATCH_S:
                remove_tree(path)
        copies = [path for path in found if not path.name.startswith(".")]
        total = 0
        for path in sorted(copies, key=_used_at, reverse=True):
            if path.name.endswith(boot_id()):
                try:
                    total += int((path / _SIZE).read_text())
                except FileNotFoundError:
                    continue  # another process has removed it
                if total <= self._limit_bytes:
                    continue
            with self._lock_of(path.name).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # it is currently being restored
                self._remove(path)

    def _remove(self, copy: Path) -> None:
        """Rename and then remove a copy, so that a half-removed copy can't be found."""
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self._root))
        with contextlib.suppress(FileNotFoundError):
            copy.rename(scratch / copy.name)
        remove_tree(scratch)


def _parse(text: bytes) -> list[_File]:
    """Return the files of a manifest. Raises BadCode for paths that the service should have
    refused."""
    described: list[Mapping[str, Any]] = json.loads(text)["files"]
    found = [
        _File(
            path=file["path"],
            is_executable=file["is_executable"],
            parts=tuple(_Part(**part) for part in file["parts"]),
        )
        for file in described
    ]
    wrong = next((file.path for file in found if fault_of(file.path) is not None), None)
    if wrong is not None or len(found) > MAX_FILES or collision_in(file.path for file in found):
        raise BadCode(f"the manifest has paths that are not allowed: {wrong!r}")
    return found


def _local_pack(url: str, scratch: Path) -> Path:
    """Return the path of a pack on this machine. Fetches it if necessary."""
    path = files.local_path(url)
    if path is not None:
        return path
    files.fetch(url, scratch)
    return scratch


def _write(file: _File, packs: Mapping[str, Path], target: Path) -> int:
    """Write a file from its parts, each of which is verified. Returns the file's size in bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as output:
        for part in file.parts:
            if not 0 < part.size_bytes <= PART_BYTES:
                raise BadCode(
                    f"a part of {file.path} has {part.size_bytes} bytes, but must have 1 to "
                    f"{PART_BYTES}"
                )
            with packs[part.pack].open("rb") as pack:
                pack.seek(part.start)
                data = pack.read(part.size_bytes)
            if hashlib.sha256(data).hexdigest() != part.sha256:
                raise BadCode(f"a stored part of {file.path} is damaged")
            output.write(data)
        size = output.tell()
    target.chmod(0o755 if file.is_executable else 0o644)
    return size


def _put_copy(copy: Path, directory: Path) -> None:
    os.utime(copy)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _put_folder(copy / _FILES, directory)


def _used_at(path: Path) -> float:
    """Return when the copy was last used; 0 if another process has removed it in the meantime."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _put_folder(source: Path, target: Path) -> None:
    """Copy the files of a folder to their paths, replacing anything that is in the way."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        target.unlink()
    target.mkdir(exist_ok=True)
    target.chmod(0o700)
    with os.scandir(source) as found:
        for entry in found:
            put = _put_folder if entry.is_dir() else _put_file
            put(Path(entry.path), target / entry.name)


def _put_file(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        remove_tree(target)
    # Replace the file with a new one, so that open files and the targets of links are not modified.
    # The temporary name contains a digest instead of the file's name, which may already have the
    # maximum length.
    digest = hashlib.sha256(target.name.encode()).hexdigest()
    partial = target.with_name(f".{digest[:32]}.dray-partial")
    partial.unlink(missing_ok=True)
    shutil.copyfile(source, partial)
    shutil.copymode(source, partial)
    partial.replace(target)
