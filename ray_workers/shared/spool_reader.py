"""Functions for the node agent to read spools, which `dray.train.spool` writes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dray.train.spool import note_known, segments
from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.folders.removal import remove_tree

MAX_DEPTH = 64
"""Maximum nesting depth of a frame's JSON. More deeply nested JSON could be parsed on the node, but
not passed on to the service."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?$)|([\[{\]}])')
"""Pattern for brackets outside of strings. The pattern also matches unterminated strings;
otherwise, the search would restart at each quote in such a string."""


@dataclass(frozen=True)
class SpoolRead:
    """New data from an attempt's spools on a node."""

    data: Mapping[str, bytes]
    """Complete frames, keyed by spool key."""
    more: bool
    """Whether the limit was reached, so that more can be read immediately."""


def spool_key(rank: int, incarnation: int, stream: str) -> str:
    """Return the name of a spool within its attempt. The name is also the key of the spool in a
    poll's cursor."""
    return f"r{rank}.{incarnation}.{stream}"


def parse_key(key: str) -> tuple[int, int]:
    """Return the rank and the incarnation in a spool key."""
    rank, incarnation, _ = key.removeprefix("r").split(".")
    return int(rank), int(incarnation)


def stream_of(key: str) -> tuple[int, str]:
    """Return the part of a spool key that all incarnations of a rank share: the rank and the
    stream."""
    rank, _, stream = key.removeprefix("r").split(".")
    return int(rank), stream


def read(directory: Path, offset: int, max_bytes: int) -> bytes:
    """Return complete frames, starting at `offset`: at most `max_bytes`, but at least one frame."""
    parts: list[bytes] = []
    size = 0
    for start, path in segments(directory):
        try:
            end = start + path.stat().st_size
            if end <= offset:
                continue
            with path.open("rb") as file:
                file.seek(max(0, offset - start))
                chunk = file.read(max(max_bytes - size, 1))
                cut = chunk.rfind(b"\n") + 1
                if cut == 0 and not parts:  # a frame longer than the limit
                    chunk += file.readline()
                    cut = len(chunk) if chunk.endswith(b"\n") else 0
        except FileNotFoundError:  # the segment was delivered and discarded in the meantime
            continue
        parts.append(chunk[:cut])
        size += cut
        offset += cut
        if cut < end - max(start, offset - cut) or size >= max_bytes:
            break
    return b"".join(parts)


def acknowledge(directory: Path, keys: Iterable[str], cursor: Mapping[str, int]) -> None:
    """Delete the frames before `cursor`, which the service has stored. Also notify the ranks, which
    may be waiting until the service has stored their frames."""
    for key in keys:
        offset = cursor.get(key, 0)
        discard(directory / key, before=offset)
        note_known(directory / key, offset, offset)


def read_all(
    directory: Path, keys: Sequence[str], cursor: Mapping[str, int], max_bytes: int
) -> SpoolRead:
    """Return new frames from each of an attempt's spools.

    `keys` are sorted by rank and incarnation. Frames of a replacement are read after all frames of
    the process it replaced, so that steps and lines are in order.
    """
    found: dict[str, bytes] = {}
    behind: set[tuple[int, str]] = set()
    for left, key in zip(range(len(keys), 0, -1), keys, strict=True):
        if stream_of(key) in behind:
            continue
        offset = cursor.get(key, 0)
        data = read(directory / key, offset, max(max_bytes // left, 1))
        if data:
            note_known(directory / key, offset, offset + len(data))
            found[key] = data
            max_bytes -= len(data)
            if has_more(directory / key, offset + len(data)):
                behind.add(stream_of(key))
    return SpoolRead(found, bool(behind))


def has_more(directory: Path, offset: int) -> bool:
    """Whether anything was appended after `offset`."""
    found = segments(directory)
    if not found:
        return False
    start, path = found[-1]
    try:
        return start + path.stat().st_size > offset
    except FileNotFoundError:
        return False


def quiet_s(directories: Iterable[Path], now: float) -> float:
    """Return the number of seconds since a frame was last appended to one of these spools; 0 if
    there are no spools.

    `now` is the Unix time in seconds.
    """
    written_at = []
    for directory in directories:
        for _, path in segments(directory)[-1:]:
            with contextlib.suppress(FileNotFoundError):
                written_at.append(path.stat().st_mtime)
    return max(now - max(written_at), 0.0) if written_at else 0.0


def tail(directory: Path) -> bytes:
    """Return the complete frames of the newest segment."""
    found = segments(directory)
    data = found[-1][1].read_bytes() if found else b""
    return data[: data.rfind(b"\n") + 1]


def discard(directory: Path, before: int) -> None:
    """Delete the segments that end before `before`, except the newest segment."""
    found = segments(directory)
    for (_, path), (next_start, _) in itertools.pairwise(found):
        if next_start <= before:
            path.unlink(missing_ok=True)


def remove(directory: Path) -> None:
    """Delete a spool, or all spools of an attempt."""
    remove_tree(directory)
    # Delete the job's folder when the spools of its last attempt have been deleted.
    try:
        os.rmdir(directory.parent)  # noqa: PTH106
    except OSError:
        return


def depth_of(line: bytes) -> int:
    """Return the maximum nesting of JSON brackets, ignoring brackets in strings."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(line):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(bracket, 0)
        deepest = max(deepest, depth)
    return deepest


def decode(key: str, data: bytes) -> Iterator[Frame]:
    """Yield the frames in a sequence of complete lines.

    A line that is not a frame is skipped, since an error here would stop the job. Only a program
    that writes directly to the spool can cause such a line.
    """
    rank, incarnation = parse_key(key)
    for line in data.splitlines():
        try:
            if line.count(b"[") + line.count(b"{") > MAX_DEPTH and depth_of(line) > MAX_DEPTH:
                continue
            raw = json.loads(line)
            kind, time, body = FrameKind(raw["kind"]), float(raw["time"]), dict(raw["body"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        yield Frame(rank=rank, incarnation=incarnation, kind=kind, time=time, body=body)
