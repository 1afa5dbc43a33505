"""The spool: files on a node in which a process stores frames until they are delivered.

A spool is a directory of segment files, named after the byte offset of their first frame. One
process appends frames. A frame is one line of JSON, written by a single `write`: a reader that
stops at the last newline never sees half a frame, even if the writer is killed. The reader deletes
segments that have been delivered. The size of a spool is limited: beyond `limit_bytes` undelivered
bytes, non-vital frames are dropped and counted. While the disk is full, the writer keeps frames in
memory: all vital frames, and up to `WAITING_BYTES` of other frames.

A file next to the segments holds two offsets. The service has stored the frames up to the first
offset. The frames up to the second offset have been sent to the service, which may have stored
them. The process that writes frames reads this file before it deletes superseded checkpoints. If
nothing delivers the spool, the file does not exist."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SEGMENT_BYTES = 1 << 20
SEGMENT_SUFFIX = ".seg"
WAITING_BYTES = 1 << 20
KNOWN = "known"
_COUNTS = struct.Struct("<QQ")

# Share one encoder, because `json.dumps` creates a new one on every call with custom separators.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def segment_path(directory: Path, offset: int) -> Path:
    return directory / f"{offset:020d}{SEGMENT_SUFFIX}"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Return (first offset, path) of each segment, oldest first; empty if there is no such
    spool."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    found = (name for name in names if name.endswith(SEGMENT_SUFFIX))
    return sorted((int(name.removesuffix(SEGMENT_SUFFIX)), directory / name) for name in found)


class Known(NamedTuple):
    """Number of bytes of a spool that have reached the service."""

    stored: float
    sent: float
    """Bytes sent to the service, which may have stored them already."""


EVERYTHING = Known(math.inf, math.inf)
"""The value for a spool whose delivery is not tracked."""


def begin_count(directory: Path) -> None:
    """Start tracking how much of the spool has reached the service, if the disk has space."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / KNOWN).open("xb") as file:
            file.write(_COUNTS.pack(0, 0))


def note_known(directory: Path, stored: int, sent: int) -> None:
    """Record how much of the spool has reached the service, if this is tracked."""
    before = known(directory)
    if before == EVERYTHING or before == (max(stored, before.stored), sent):
        return
    descriptor = os.open(directory / KNOWN, os.O_WRONLY)
    try:
        os.pwrite(descriptor, _COUNTS.pack(max(stored, int(before.stored)), sent), 0)
    finally:
        os.close(descriptor)


def known(directory: Path) -> Known:
    try:
        return Known(*_COUNTS.unpack((directory / KNOWN).read_bytes()))
    except (FileNotFoundError, struct.error):  # the file is just being created
        return EVERYTHING


class SpoolWriter:
    """Appends frames to one spool, from one thread of one process."""

    def __init__(self, directory: Path, *, limit_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._fd = -1
        self._offset = 0  # total bytes appended
        self._segment_start = 0
        self._num_dropped = 0
        self._is_full = False
        """Whether the spool had too many undelivered bytes when a new segment was last needed."""
        self._waiting: deque[bytes] = deque()
        """Frames for which the disk had no space, oldest first."""

    def append(
        self, kind: str, body: Mapping[str, Any], *, vital: bool = False, at: float | None = None
    ) -> bool:
        """Add one frame. Returns False if the frame was dropped because it fit neither on disk nor
        in memory.

        vital: the frame must never be dropped. Vital frames are rare. at: Unix time; None for the
        current time.
        """
        at = time.time() if at is None else at
        line = _encode({"kind": kind, "time": at, "body": body}).encode() + b"\n"
        if not (self.flush() and self._add(line, vital=vital)):
            if not (vital or self._may_wait(line)):
                self._num_dropped += 1
                return False
            self._waiting.append(line)
        return True

    def take_num_dropped(self) -> int:
        """Return the number of frames dropped since the last call."""
        number, self._num_dropped = self._num_dropped, 0
        return number

    @property
    def num_waiting(self) -> int:
        """Number of frames kept in memory because the disk had no space."""
        return len(self._waiting)

    def flush(self) -> bool:
        """Write the frames waiting for disk space. Returns whether all frames have been written."""
        while self._waiting and self._add(self._waiting[0], vital=True):
            self._waiting.popleft()
        return not self._waiting

    @property
    def position(self) -> int:
        """Offset of the next frame."""
        return self._offset + sum(map(len, self._waiting))

    def _add(self, line: bytes, *, vital: bool) -> bool:
        full = self._fd < 0 or self._offset - self._segment_start >= SEGMENT_BYTES
        if (full and not self._roll(len(line), vital=vital)) or not self._write(line):
            return False
        self._offset += len(line)
        return True

    def _may_wait(self, line: bytes) -> bool:
        """Whether there is space in memory for a frame that was refused because the disk is full. A
        frame that was refused because the spool has reached its limit is not kept in memory."""
        waiting = sum(map(len, self._waiting))
        return not self._is_full and waiting + len(line) <= WAITING_BYTES

    def _write(self, line: bytes) -> bool:
        """Write the entire line or nothing, because a partial frame would corrupt the next
        frame."""
        try:
            written = os.write(self._fd, line)
        except OSError:
            return False
        if written < len(line):
            os.ftruncate(self._fd, self._offset - self._segment_start)
        return written == len(line)

    def _roll(self, next_bytes: int, *, vital: bool) -> bool:
        """Begin a segment if the undelivered frames leave enough space for it."""
        retained = segments(self._directory)
        undelivered = self._offset - retained[0][0] if retained else 0
        needed = undelivered + max(next_bytes, SEGMENT_BYTES)
        self._is_full = needed > self._limit_bytes + SEGMENT_BYTES and not vital
        if self._is_full:
            return False
        self._end_segment()
        path = segment_path(self._directory, self._offset)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        self._segment_start = self._offset
        return True

    def close(self) -> None:
        self.flush()
        self._end_segment()

    def _end_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
