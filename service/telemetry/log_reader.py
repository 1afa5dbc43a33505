"""Reads logs. The order within a rank is exact, and ranks are merged by time.

A cursor contains the number of the next line for each attempt and rank. Line numbers only increase,
and omitted lines are also counted. Therefore, a line that arrives late from a rank on a slow node
still appears on a later page, and no line appears twice.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.log_rows import without_mark
from service.db.models import LogChunkRow
from service.db.repositories.telemetry import chunks as repository
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, FolderSpoilt, StorageUnavailable
from service.storage.storage import Storage
from service.telemetry.log_lines import MAX_TIME_S, Line, decode_lines

Stream = tuple[int, int]
"""(attempt, rank)"""
MAX_SEARCHED = 20_000
"""Maximum number of lines that are searched for one page."""
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""Control sequences and characters of terminals, which a search ignores."""


@dataclass(frozen=True)
class Chunk:
    """Some consecutive lines, in `text` or in storage."""

    first_line: int
    num_lines: int
    size_bytes: int
    text: str | None
    storage_key: str | None


def find(
    session: Session,
    job_id: str,
    *,
    rank: int | None,
    attempt: int | None,
    begin: Mapping[Stream, int],
    limit: int,
) -> dict[Stream, list[Chunk]]:
    """Return the chunks that contain the next `limit` lines of each stream. Chunks that are stored
    in SQL include their text."""
    wanted: list[LogChunkRow] = []
    num_lines: Counter[Stream] = Counter()
    for row in repository.log_chunks(session, job_id, attempt=attempt, rank=rank):
        stream = (row.attempt, row.rank)
        new = row.first_line + row.num_lines - max(row.first_line, begin.get(stream, 0))
        if new > 0 and num_lines[stream] <= limit:
            num_lines[stream] += new
            wanted.append(row)
    texts = repository.log_texts(
        session, job_id, [row for row in wanted if row.storage_key is None]
    )
    found: dict[Stream, list[Chunk]] = {}
    for row in wanted:
        text = texts.get((row.attempt, row.rank, row.first_line))
        chunk = Chunk(row.first_line, row.num_lines, row.size_bytes, text, row.storage_key)
        found.setdefault((row.attempt, row.rank), []).append(chunk)
    return found


def page(
    storage: Storage,
    found: Mapping[Stream, Sequence[Chunk]],
    begin: Mapping[Stream, int],
    limit: int,
    contains: str | None = None,
) -> tuple[list[views.LogLine], dict[Stream, int], bool]:
    """Return at most `limit` lines, the number of the next line of each stream, and whether more
    lines exist. With `contains`, return only the lines among these that contain this text.

    Only the chunks of this page are read from storage, outside of any transaction.
    """
    streams = [_lines(storage, s, begin.get(s, 0), chunks) for s, chunks in sorted(found.items())]
    merged = heapq.merge(*streams, key=lambda entry: entry[0])
    taken = list(islice(merged, limit + 1))
    positions = dict(begin)
    wanted = None if contains is None else contains.casefold()
    lines = []
    for (attempt, _, rank), position, (seconds, text) in taken[:limit]:
        positions[attempt, rank] = position + 1
        row, text = without_mark(text)
        if wanted is not None and wanted not in _ESCAPES.sub("", text).casefold():
            continue
        time = datetime.fromtimestamp(seconds, UTC)
        line = views.LogLine(
            attempt=attempt, rank=rank, number=position, time=time, text=text, row=row
        )
        lines.append(line)
    # The number of merged lines does not always show that more lines exist: `find` stops at the
    # limit, and an unreadable chunk counts as a single line. So count the lines of the chunks too.
    is_cut = any(_num_lines(chunks, begin.get(s, 0)) > limit for s, chunks in found.items())
    return lines, positions, is_cut or len(taken) > limit


def _num_lines(chunks: Sequence[Chunk], begin: int) -> int:
    return sum(
        chunk.first_line + chunk.num_lines - max(chunk.first_line, begin) for chunk in chunks
    )


def _lines(
    storage: Storage, stream: Stream, begin: int, chunks: Sequence[Chunk]
) -> Iterator[tuple[tuple[int, float, int], int, Line]]:
    """Yield the merge key, line number and line for each line of the stream from `begin`.

    The time in the key never decreases, even if a node's clock is set back, because merging
    requires sorted streams.
    """
    attempt, rank = stream
    newest = float("-inf")
    for chunk in chunks:
        lines = _lines_of(storage, chunk)
        first = chunk.first_line
        if lines is None:
            text = f"[dray] {chunk.num_lines} lines are missing here: their file in the storage "
            text += "was deleted or changed"
            lines, first = [(max(newest, 0.0), text)], first + chunk.num_lines - 1
        for position, line in enumerate(lines[: chunk.num_lines], first):
            if position >= begin:
                newest = max(newest, line[0])
                yield (attempt, newest, rank), position, line


def _lines_of(storage: Storage, chunk: Chunk) -> list[Line] | None:
    """Return the chunk's lines, or None if another program with write access damaged it."""
    if chunk.storage_key is None:
        return decode_lines(chunk.text or "")
    try:
        lines = decode_lines(storage.read_bytes(chunk.storage_key, 0, chunk.size_bytes).decode())
        is_whole = len(lines) == chunk.num_lines and all(map(_is_line, lines))
        return lines if is_whole else None
    except FileNotFoundError as error:
        if storage.accepts_files_near(chunk.storage_key):
            return None
        raise StorageUnavailable(
            f"the log chunk {chunk.storage_key} is missing from the storage"
        ) from error
    except (FolderSpoilt, ValueError, LookupError, TypeError, RecursionError):
        return None


def _is_line(line: Line) -> bool:
    seconds, text = line
    return isinstance(seconds, float | int) and 0 <= seconds <= MAX_TIME_S and type(text) is str


def encode_positions(job_id: str, positions: Mapping[Stream, int]) -> str:
    return encode_cursor(f"logs:{job_id}", [[a, r, n] for (a, r), n in sorted(positions.items())])


def decode_positions(job_id: str, cursor: str | None) -> dict[Stream, int]:
    """Decode a cursor. Raises BadCursor if the cursor was not created by `encode_positions` for
    this job."""
    if cursor is None:
        return {}
    data = decode_cursor(f"logs:{job_id}", cursor)
    try:
        positions = {(attempt, rank): lines for attempt, rank, lines in data}
        numbers = [number for (a, r), n in positions.items() for number in (a, r, n)]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise ValueError(data)
    except (TypeError, ValueError) as error:
        raise BadCursor("the cursor does not belong to this job's logs") from error
    return positions
