"""The node's copies of uploaded code: fetched and checked once, and put back at each start.

A copy is kept by the hash of its description. Each attempt of a job finds the same bytes in the
job's working directory, whatever an earlier one made of them; what else lies there stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.code.manifest import MAX_FILES, PART_BYTES, collision_in, fault_of
from dray.train import files
from ray_workers.shared.contracts import CodeRef
from ray_workers.shared.paths import entries, own_folder

LIMIT_BYTES = 4 << 30
"""Most that the copies of a machine take together; those that were used last are kept."""
SCRATCH_S = 3600.0
"""How long a copy may take to be made."""
_SCRATCH = ".new-"


class BadCode(Exception):
    """What the storage has is not what was uploaded."""


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
    """The copies of one machine; several processes may use them at the same time. Blocking."""

    def __init__(self, root: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._root = root
        self._limit_bytes = limit_bytes

    def put_back(self, code: CodeRef, storage_url: str, directory: Path) -> None:
        """Make the files of this code in a directory what they are in the upload.

        BadCode if the storage has other files; OSError if it can't be read, or a disk is full.
        """
        own_folder(self._root)
        with self._locked(code):
            copy = self._root / code.manifest_sha256
            if not copy.is_dir():
                self._make_room()
                self._fetch(code, storage_url, copy)
            os.utime(copy)
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in sorted(_files_below(copy)):
                _put_file(copy / path, directory, path)

    @contextmanager
    def _locked(self, code: CodeRef) -> Iterator[None]:
        """Alone with this copy; the lock goes with the process that holds it."""
        with self._lock_of(code.manifest_sha256).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock_of(self, name: str) -> Path:
        """One of sixteen files, so that they do not become more with every upload."""
        return self._root / f".lock-{name[0]}"

    def _fetch(self, code: CodeRef, storage_url: str, copy: Path) -> None:
        """Fetch code into a folder beside, which gets its name once it is whole."""
        text = files.read(code.manifest_url)
        if hashlib.sha256(text).hexdigest() != code.manifest_sha256:
            raise BadCode(f"the description of {code.id} in the storage is another one")
        found = _parse(text)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self._root))
        try:
            whole = scratch / "code"
            whole.mkdir()
            packs = sorted({part.pack for file in found for part in file.parts})
            local = {
                pack: _local_pack(f"{storage_url.rstrip('/')}/{pack}", scratch / f"pack-{number}")
                for number, pack in enumerate(packs)
            }
            for file in found:
                _write(file, local, whole / file.path)
            whole.rename(copy)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _make_room(self) -> None:
        """Remove the copies that were used longest ago, beyond the limit, and those that a process
        that is gone did not come to the end of."""
        for path in self._root.glob(f"{_SCRATCH}*"):
            if time.time() - path.stat().st_mtime > SCRATCH_S:
                shutil.rmtree(path, ignore_errors=True)
        copies = [path for path in entries(self._root) if not path.name.startswith(".")]
        total = 0
        for path in sorted(copies, key=lambda path: path.stat().st_mtime, reverse=True):
            total += sum((path / name).stat().st_size for name in _files_below(path))
            if total > self._limit_bytes:
                with self._lock_of(path.name).open("w") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        continue  # it is being put back just now
                    shutil.rmtree(path, ignore_errors=True)


def _parse(text: bytes) -> list[_File]:
    """The files of a description; BadCode for paths that the service should have refused."""
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
        raise BadCode(f"the description has paths that can't be: {wrong!r}")
    return found


def _local_pack(url: str, scratch: Path) -> Path:
    """A pack as a file of this machine."""
    path = files.local_path(url)
    if path is not None:
        return path
    files.fetch(url, scratch)
    return scratch


def _write(file: _File, packs: Mapping[str, Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as output:
        for part in file.parts:
            if not 0 < part.size_bytes <= PART_BYTES:
                raise BadCode(f"{file.path} has a part of {part.size_bytes} bytes")
            with packs[part.pack].open("rb") as pack:
                pack.seek(part.start)
                data = pack.read(part.size_bytes)
            if hashlib.sha256(data).hexdigest() != part.sha256:
                raise BadCode(f"a part of {file.path} is damaged in the storage")
            output.write(data)
    target.chmod(0o755 if file.is_executable else 0o644)


def _files_below(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _put_file(source: Path, directory: Path, path: str) -> None:
    """Copy a file to its place, also where something else is in the way."""
    target = directory
    *folders, name = path.split("/")
    for folder in folders:
        target = target / folder
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            target.unlink()
        target.mkdir(exist_ok=True, mode=0o700)
    target = target / name
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    # A new file in its place: one that is open elsewhere, or a link, is not written through.
    partial = target.with_name(f".{name[:200]}.dray-partial")
    partial.unlink(missing_ok=True)
    shutil.copyfile(source, partial)
    shutil.copymode(source, partial)
    partial.replace(target)
