"""Maintains a copy of a script's checkpoint folder in storage that is not a folder, such as
`s3://`.

Files that have stopped changing are copied periodically; at the end, all files are copied. The next
attempt restores these files on any node. If the script deletes a file, the file is also deleted in
the storage. Links to files in the folder are copied as files.
"""

from __future__ import annotations

import importlib
import os
import stat
import threading
from pathlib import Path
from typing import Any, NamedTuple

from dray.train import files

PERIOD_S = 15.0
"""Pause between two scans of the folder."""


class _Stamp(NamedTuple):
    size: int
    mtime_ns: int
    inode: int


class FolderMirror:
    """A folder and its copy. The methods block, and only one call to `copy` runs at a time."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url.rstrip("/")
        self._copied: dict[str, _Stamp] = {}
        self._seen: dict[str, _Stamp] = {}
        """Files as of the last scan."""
        self._lock = threading.Lock()
        self._has_ended = False

    def end(self) -> None:
        """Stop copying and deleting files, without waiting for the storage. The folder can then be
        deleted without deleting the copy."""
        self._has_ended = True

    def restore(self) -> int:
        """Fetch all files of the copy. Returns their number. Raises any error of the storage."""
        filesystem, root = _url_to_fs(self._url)
        filesystem.invalidate_cache()
        found = filesystem.find(root) if filesystem.exists(root) else []
        for path in found:
            name = str(path).removeprefix(str(root)).lstrip("/")
            target = self._folder / name
            if not target.resolve().is_relative_to(self._folder.resolve()):
                raise ValueError(f"{path} is outside of the folder")
            files.fetch(f"{self._url}/{name}", target)
        self._copied = self._stamps()
        return len(found)

    def copy(self, *, everything: bool) -> None:
        """Copy the files that have changed since they were last copied, except for files that have
        also changed since the last scan. With `everything`, these files are also copied. Raises any
        error of the storage; the next call then continues with the remaining files. Raises OSError
        if the folder can't be read; in this case, nothing is deleted from the copy."""
        with self._lock:
            # If the whole folder is gone, leave the copy alone: either another process deleted the
            # folder, or the script is about to recreate it.
            if os.path.lexists(self._folder):
                self._copy(everything=everything)

    def _copy(self, *, everything: bool) -> None:
        stamps = self._stamps()
        for name, stamp in stamps.items():
            is_quiet = everything or self._seen.get(name) == stamp
            if self._copied.get(name) == stamp or not is_quiet:
                continue
            if self._has_ended:
                return
            try:
                files.store(self._folder / name, f"{self._url}/{name}")
            except FileNotFoundError:
                continue  # deleted in the meantime
            # If the file has changed, the copy may be inconsistent, and will be repeated.
            if self._stamp(name) == stamp:
                self._copied[name] = stamp
        for name in self._copied.keys() - stamps.keys():
            if self._has_ended:
                return
            files.remove_file(f"{self._url}/{name}")
            del self._copied[name]
        self._seen = stamps

    def _stamps(self) -> dict[str, _Stamp]:
        found = {}
        if self._folder.is_symlink():
            raise NotADirectoryError("DRAY_CHECKPOINT_DIR was replaced by a link")
        for at, _, names in os.walk(self._folder, onerror=_unless_deleted):
            for entry in names:
                name = str(Path(at, entry).relative_to(self._folder))
                stamp = self._stamp(name)
                if stamp is not None and name.isprintable():
                    found[name] = stamp
        return found

    def _stamp(self, name: str) -> _Stamp | None:
        path = self._folder / name
        try:
            if not path.resolve(strict=True).is_relative_to(self._folder.resolve()):
                return None
            status = path.stat()
        except (OSError, RuntimeError):
            return None
        is_file = stat.S_ISREG(status.st_mode)
        return _Stamp(status.st_size, status.st_mtime_ns, status.st_ino) if is_file else None


def _unless_deleted(error: OSError) -> None:
    """Raise the error if a folder can't be read, so that its files don't count as deleted."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _url_to_fs(url: str) -> tuple[Any, str]:
    filesystem, root = importlib.import_module("fsspec").core.url_to_fs(url)
    return filesystem, root
