"""Reading logs back: the order within a rank is exact, ranks are merged by time.

A cursor holds, for each attempt and rank, the place of the next line. Places only grow; those of
lines that are left out are missing. So a line that arrives late, from a rank whose node was slow,
still comes on a later page, and none comes twice.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from sqlalchemy.orm import Session

from dray import views
from service.db.models import LogChunkRow
from service.db.repositories import chunks as repository
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, StorageUnavailable
from service.storage.storage import Storage
from service.telemetry.log_writer import Line, decode_lines

Stream = tuple[int, int]
"""(attempt, rank)"""


@dataclass(frozen=True)
class Chunk:
    """Where some consecutive lines are: in `text`, or in storage."""

    first_line: int
    num_lines: int
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
    """The chunks of the next `limit` lines of each stream; those in SQL have their text."""
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
        chunk = Chunk(row.first_line, row.num_lines, text, row.storage_key)
        found.setdefault((row.attempt, row.rank), []).append(chunk)
    return found


def page(
    storage: Storage,
    found: Mapping[Stream, Sequence[Chunk]],
    begin: Mapping[Stream, int],
    limit: int,
) -> tuple[list[views.LogLine], dict[Stream, int], bool]:
    """At most `limit` lines, the places after them, and whether more are there now.

    Only the chunks of this page are read from storage, and no transaction waits for that.
    """
    streams = [_lines(storage, s, begin.get(s, 0), chunks) for s, chunks in sorted(found.items())]
    merged = heapq.merge(*streams, key=lambda entry: entry[0])
    taken = list(islice(merged, limit + 1))
    places = dict(begin)
    lines = []
    for (attempt, _, rank), place, (seconds, text) in taken[:limit]:
        places[attempt, rank] = place + 1
        time = datetime.fromtimestamp(seconds, UTC)
        lines.append(views.LogLine(attempt=attempt, rank=rank, time=time, text=text))
    return lines, places, len(taken) > limit


def _lines(
    storage: Storage, stream: Stream, begin: int, chunks: Sequence[Chunk]
) -> Iterator[tuple[tuple[int, float, int], int, Line]]:
    """The stream's lines from `begin`, each with the key by which it is merged, and its place.

    The key's time never goes back, though a node's clock may: else the merge would not be one.
    """
    attempt, rank = stream
    newest = float("-inf")
    for chunk in chunks:
        lines = decode_lines(_text(storage, chunk))[: chunk.num_lines]
        for place, line in enumerate(lines, chunk.first_line):
            if place >= begin:
                newest = max(newest, line[0])
                yield (attempt, newest, rank), place, line


def _text(storage: Storage, chunk: Chunk) -> str:
    if chunk.storage_key is None:
        return chunk.text or ""
    try:
        return storage.read_bytes(chunk.storage_key).decode()
    except FileNotFoundError as error:
        raise StorageUnavailable(
            f"the log chunk {chunk.storage_key} is missing in the storage"
        ) from error


def encode_places(job_id: str, places: Mapping[Stream, int]) -> str:
    return encode_cursor(f"logs:{job_id}", [[a, r, n] for (a, r), n in sorted(places.items())])


def decode_places(job_id: str, cursor: str | None) -> dict[Stream, int]:
    """BadCursor for anything that `encode_places` of the same job did not give."""
    if cursor is None:
        return {}
    data = decode_cursor(f"logs:{job_id}", cursor)
    try:
        places = {(attempt, rank): lines for attempt, rank, lines in data}
        numbers = [number for (a, r), n in places.items() for number in (a, r, n)]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise ValueError(data)
    except (TypeError, ValueError) as error:
        raise BadCursor("the cursor is not one that this job's logs gave out") from error
    return places
