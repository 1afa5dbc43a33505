"""Sources with `file://`: a file or folder on the node."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import Listed, Listing, Sink, is_data
from ray_workers.shared.node_needs import DataPolicy


class LocalOrigin:
    """A file or folder that is read in place."""

    def __init__(self, url: str, policy: DataPolicy, suffixes: tuple[str, ...] | None) -> None:
        self._location = url
        self._path = Path(unquote(urlsplit(url).path))
        self._suffixes = suffixes
        self._roots = None
        if policy.file_roots is not None:
            self._roots = tuple(Path(root).resolve() for root in policy.file_roots)

    def listing(self) -> Listing:
        path = self._allowed(self._path, self._location)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise broken(
                self._location, "this file or folder does not exist on this node"
            ) from None
        except PermissionError:
            raise broken(
                self._location, "the user that runs Ray on this node has no permission to read it"
            ) from None
        except OSError as error:
            raise broken(self._location, f"can't be read: {error.strerror}") from error
        if stat.S_ISREG(status.st_mode):
            return Listing((self._listed(path.name, path, status),), is_folder=False)
        if not stat.S_ISDIR(status.st_mode):
            raise broken(self._location, "is neither a file nor a folder")
        if self._suffixes is None:
            raise broken(self._location, "is a folder, but this format requires a single file")
        files = tuple(sorted(self._walk(path), key=lambda file: file.name))
        return Listing(files, is_folder=True)

    def fetch(self, file: Listed, sink: Sink) -> None:
        assert file.path is not None
        read_pieces(file.path, sink)

    def _walk(self, folder: Path) -> Iterator[Listed]:
        assert self._suffixes is not None
        for parent, folders, names in os.walk(folder, onerror=self._refuse):
            folders[:] = sorted(filter(is_data, folders))
            for name in folders:
                if Path(parent, name).is_symlink():
                    fault = "is a link to a folder; only links to files are followed"
                    raise broken(f"file://{parent}/{name}", fault)
            for name in names:
                path = Path(parent, name)
                if not is_data(name) or not name.lower().endswith(self._suffixes):
                    continue
                target = self._allowed(path, f"file://{path}") if path.is_symlink() else path
                try:
                    status = target.stat()
                except FileNotFoundError:
                    raise broken(f"file://{path}", "is a broken link") from None
                except OSError as error:
                    raise broken(f"file://{path}", f"can't be read: {error.strerror}") from error
                if not stat.S_ISREG(status.st_mode):
                    raise broken(f"file://{path}", "is not a regular file")
                yield self._listed(path.relative_to(folder).as_posix(), target, status)

    def _refuse(self, error: OSError) -> None:
        raise broken(f"file://{error.filename}", f"can't be read: {error.strerror}") from error

    def _listed(self, name: str, path: Path, status: os.stat_result) -> Listed:
        version = f"{status.st_mtime_ns}:{status.st_ino}"
        return Listed(name, status.st_size, version, path)

    def _allowed(self, path: Path, location: str) -> Path:
        """Return the path with its links resolved. Raises DataError if the path is outside the
        allowed roots."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # ValueError if the name contains NUL
            raise broken(location, f"can't be followed: {error}") from error
        if self._roots is not None and not any(real.is_relative_to(root) for root in self._roots):
            raise broken(
                location,
                "is outside the folders from which this cluster allows reading data "
                "(DRAY_DATA_ROOTS)",
            )
        return real


def read_pieces(path: Path, sink: Sink) -> None:
    """Pass the content of a file to the sink. Raises DataError."""
    try:
        with open(path, "rb", buffering=0) as source:
            while piece := source.read(1 << 20):
                sink(piece)
    except OSError as error:
        # Keep the cause, which distinguishes a disk failure from an error in the data.
        raise broken(f"file://{path}", f"can't be read: {error.strerror}") from error
