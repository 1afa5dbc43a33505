"""Metrics in files that a script's loggers write: TensorBoard event files, and tables."""

from __future__ import annotations

import contextlib
import csv
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from dray.tensorboard.event_files import Damaged, records
from dray.train.storage_faults import StorageError
from ray_workers.node.found_metrics.event_files import scalars
from ray_workers.node.found_metrics.lines import FoundPoint, is_key, number_in, step_in
from ray_workers.node.found_metrics.runs import Run, RunNames
from ray_workers.node.found_metrics.stored_names import MAX_NAMES, StoredNames

MAX_ENTRIES = 20_000
"""Maximum number of entries that a scan of the folders visits, starting with the top folders."""
MAX_FILES = 1000
READ_BYTES = 2 << 20
"""Maximum number of bytes that a scan reads from a file; more than the longest record."""
MOST_LOADS = 3
"""Maximum number of scans that try to load the stored names. If the storage fails every time, runs
get new names."""
POINTS_PER_LOOK = 20_000
"""Number of points after which a scan ends. Each scan begins with the file after the last file of
the previous scan."""
MAX_HEADER_BYTES = 64 << 10
COMPARED_BYTES = 1024
"""Maximum number of bytes before the offset that are compared to detect a rewritten file."""
PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages"})
EVENTS = ".tfevents."
TABLES = ("metrics.csv", "results.csv", "summary.csv")
"""The files that lightning's CSVLogger, ultralytics and timm's training script write,
respectively."""
STEP_COLUMNS = ("step", "epoch")
TOP = "job"
"""The name that stands for the job's directory in the names of series."""


class MetricFiles:
    """Follows the files that are written to some folders after a given time. Only appended data is
    read from an older file, such as a file from an earlier attempt or from the upload. A file that
    is rewritten is read from its beginning. Links are not followed.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        sources: frozenset[str],
        since: float,
        stored: StoredNames | None = None,
    ) -> None:
        """since: Unix time in seconds. stored: the names that earlier processes gave to the job's
        series."""
        self._folders = folders
        self._sources = sources
        self._since = since
        self._files: dict[str, _EventFile | _Table] = {}
        self._names = RunNames()
        self._stored = stored
        self._loads_left = MOST_LOADS if stored is not None else 0
        self._runs: dict[str, Run] = {}
        """The run of each followed file."""
        self._passed_over: set[str] = set()
        self._first = 0
        self.has_more = False
        """Whether the last scan left anything unread."""

    def read(self) -> list[FoundPoint]:
        """Return the numbers that have been written since the last call, file by file."""
        for path in self._found():
            if path not in self._files:
                self._follow(path)
        if self._files and not self._has_names():
            self.has_more = True
            return []
        found: list[tuple[Run, Sequence[FoundPoint]]] = []
        num_points = 0
        self.has_more = False
        paths = list(self._files)
        first, self._first = self._first, 0
        for path in paths[first:] + paths[:first]:
            file = self._files[path]
            with contextlib.suppress(OSError):
                read = file.read()
                self.has_more = self.has_more or file.has_more
                if read:
                    found.append((self._runs[path], read))
                    num_points += len(read)
            if num_points >= POINTS_PER_LOOK:
                self._first = (paths.index(path) + 1) % len(paths)
                self.has_more = True
                break
        points = self._names.named(found)
        if self._stored is not None:
            # If the storage fails, return the points anyway: they are more important than their
            # names.
            with contextlib.suppress(StorageError):
                self._stored.save(self._names.given(MAX_NAMES))
        return points

    def _has_names(self) -> bool:
        """Return True once the names that earlier processes chose are loaded, or once all tries to
        load them have failed."""
        if self._stored is None or not self._loads_left:
            return True
        self._loads_left -= 1
        try:
            self._names = RunNames(self._stored.load())
            self._loads_left = 0
            for run in self._runs.values():
                self._names.add(run)
        except Exception as error:  # whatever a storage client may raise
            print(f"the names of the metric series can't be read: {error}", flush=True)  # noqa: T201
        return not self._loads_left

    @property
    def num_passed_over(self) -> int:
        """Number of logger files that are not followed because there are too many."""
        return len(self._passed_over)

    def _follow(self, path: str) -> None:
        if len(self._files) >= MAX_FILES:
            if len(self._passed_over) < MAX_ENTRIES:
                self._passed_over.add(path)
            return
        kind = _EventFile if EVENTS in os.path.basename(path) else _Table  # noqa: PTH119
        with contextlib.suppress(OSError):
            self._files[path] = kind(path, self._since)
            self._runs[path] = self._run_of(Path(path))
            self._names.add(self._runs[path])

    def _run_of(self, path: Path) -> Run:
        """Return the run to which a file belongs. A run's event files and its table are in the same
        folder. A second table in a folder belongs to another run."""
        at, top = next(
            (at, folder) for at, folder in enumerate(self._folders) if path.is_relative_to(folder)
        )
        run = (top.name if at else TOP, *path.parent.relative_to(top).parts)
        tables = [other for other in map(Path, self._files) if other.name in TABLES]
        if path.name in TABLES and any(
            other.parent == path.parent and other != path for other in tables
        ):
            return (*run, path.stem)
        return run

    def _found(self) -> Iterator[str]:
        """Yield the paths of logger files."""
        folders, left = [str(folder) for folder in self._folders], MAX_ENTRIES
        for folder in folders:
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            left -= len(entries)
            if left < 0:
                return
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith(".") and entry.name not in PASSED_OVER:
                            folders.append(entry.path)
                    elif self._is_wanted(entry.name) and entry.is_file(follow_symlinks=False):
                        yield entry.path

    def _is_wanted(self, name: str) -> bool:
        if "tensorboard" in self._sources and EVENTS in name:
            return True
        return "csv" in self._sources and name in TABLES


class _Followed:
    """A file that grows."""

    def __init__(self, path: str, since: float) -> None:
        self._path = path
        self._offset = 0
        self._before = b""
        """The last bytes before the offset."""
        self._size_then = -1, -1.0
        self.has_more = False
        with self._open() as descriptor:
            status = os.fstat(descriptor)
            if status.st_mtime < since:
                self._offset = status.st_size
                start = max(0, status.st_size - COMPARED_BYTES)
                self._before = os.pread(descriptor, status.st_size - start, start)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """Open the file. Raises OSError unless the path names a regular file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._path, flags)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{self._path} is not a regular file")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[int | None]:
        """Yield the descriptor if the file has changed or was not read to the end, else None."""
        with self._open() as descriptor:
            status = os.fstat(descriptor)
            now = status.st_size, status.st_mtime
            if now == self._size_then and not self.has_more:
                yield None
                return
            self._size_then = now
            size = len(self._before)
            before = os.pread(descriptor, size, max(0, self._offset - size))
            if status.st_size < self._offset or before != self._before:
                self._move(0)  # it was rewritten
            yield descriptor

    def _move(self, offset: int, read: bytes = b"") -> None:
        """Set the offset. `read` contains the bytes that were read up to this offset."""
        self._offset, self._before = offset, read[-COMPARED_BYTES:]


class _EventFile(_Followed):
    _is_damaged = False

    def read(self) -> list[FoundPoint]:
        if self._is_damaged:
            return []
        with self._changed() as descriptor:
            if descriptor is None:
                return []
            data = os.pread(descriptor, READ_BYTES, self._offset)
            size = os.fstat(descriptor).st_size
        points: list[FoundPoint] = []
        end = 0
        try:
            for after, event in records(data):
                if self._offset + after > size:
                    break
                points += scalars(event)
                end = after
        except Damaged:
            self._is_damaged = True
        if end:
            # If a long record was skipped, the bytes before the offset are unknown.
            read = self._before + data[:end] if end <= len(data) else b""
            self._move(self._offset + end, read)
        self.has_more = end > 0 and self._offset < size and not self._is_damaged
        return points


class _Table(_Followed):
    _header: tuple[str, ...] = ()

    def read(self) -> list[FoundPoint]:
        with self._changed() as descriptor:
            if descriptor is None:
                return []
            head = os.pread(descriptor, MAX_HEADER_BYTES, 0)
            line, ended, _ = head.partition(b"\n")
            header = tuple(name.strip() for name in _cells(line))
            step_at = next((header.index(name) for name in STEP_COLUMNS if name in header), None)
            if not ended or step_at is None:
                return []
            if header != self._header:  # a column was added, so the file was rewritten
                if self._header:
                    self._move(0)
                self._header = header
            start = max(self._offset, len(line) + 1)
            data = os.pread(descriptor, READ_BYTES, start)
            size = os.fstat(descriptor).st_size
        rows = data[: data.rfind(b"\n") + 1]
        self._move(start + len(rows), self._before + rows)
        self.has_more = bool(rows) and len(data) == READ_BYTES and self._offset < size
        return [point for row in rows.splitlines() for point in self._of_row(row, step_at)]

    def _of_row(self, row: bytes, step_at: int) -> Iterator[FoundPoint]:
        cells = _cells(row)
        step = step_in(cells[step_at]) if step_at < len(cells) else None
        if step is None:
            return
        for name, cell in zip(self._header, cells, strict=False):
            value = number_in(cell)
            if name not in STEP_COLUMNS and value is not None and is_key(name):
                yield FoundPoint(name, step, value)


def _cells(line: bytes) -> list[str]:
    text = line.decode(errors="replace").replace("\0", "")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:  # a cell that is too large
        return []
