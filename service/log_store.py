"""Log lines on their way into chunks.

The last chunk of each rank lies in SQL; one that is full is written to storage before its row
says so, so that a transaction that is tried again writes the same object again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from ray_workers.contracts import attempt_prefix
from service.db.models import AttemptRow, JobRow, LogChunkRow
from service.db.repositories import chunks as repository
from service.storage import Storage
from service.transitions import remark

CHUNK_BYTES = 64 * 1024

Line = tuple[float, str]
"""Unix seconds by the node's clock, and the text."""


@dataclass(frozen=True)
class LogLine:
    """A line as a rank reported it."""

    rank: int
    incarnation: int
    number: int
    """Counts from 0 within the incarnation, lines that were lost on the way included."""
    seconds: float
    text: str


def encode_line(seconds: float, text: str) -> str:
    return json.dumps([seconds, text], ensure_ascii=False, separators=(",", ":")) + "\n"


def decode_lines(text: str) -> list[Line]:
    """Split at newlines only: a line's own text may hold other separators."""
    return [(seconds, line) for seconds, line in map(json.loads, text.split("\n")[:-1])]


def chunk_key(chunk: LogChunkRow) -> str:
    prefix = attempt_prefix(chunk.job_id, chunk.attempt)
    return f"{prefix}/logs/rank-{chunk.rank:05d}/{chunk.first_line:012d}.jsonl"


class LogStore:
    """Collects the lines of one reply, then appends them to the open chunks."""

    def __init__(
        self, session: Session, storage: Storage, job: JobRow, attempt: AttemptRow, now: datetime
    ) -> None:
        self._session = session
        self._storage = storage
        self._job = job
        self._attempt = attempt
        self._now = now
        self._lines: dict[int, list[LogLine]] = {}

    def add(self, line: LogLine) -> None:
        self._lines.setdefault(line.rank, []).append(line)

    def store(self) -> None:
        if not self._lines:
            return
        last = repository.last_log_chunks(
            self._session, self._job.id, self._attempt.attempt, self._lines.keys()
        )
        for rank, lines in self._lines.items():
            self._append(rank, last.get(rank), lines)
        self._lines = {}

    def _append(self, rank: int, chunk: LogChunkRow | None, lines: list[LogLine]) -> None:
        text: list[str] = [] if chunk is None or chunk.text is None else [chunk.text]
        for line in lines:
            if chunk is None or chunk.storage_key is not None:
                chunk = self._begin(rank, chunk)
                text = []
            for seconds, kept in self._kept(chunk, line):
                encoded = encode_line(seconds, kept)
                text.append(encoded)
                chunk.num_lines += 1
                chunk.size_bytes += len(encoded.encode())
            if chunk.size_bytes >= CHUNK_BYTES:
                self._close(chunk, "".join(text))
        if chunk is not None and chunk.storage_key is None:
            chunk.text = "".join(text)

    def _kept(self, chunk: LogChunkRow, line: LogLine) -> list[Line]:
        """What goes into the log for this line: a note of a gap before it, itself, or a limit."""
        job = self._job
        lost = 0
        # Last words of a process that was replaced may come after its successor's first.
        if line.incarnation >= chunk.incarnation:
            lost = line.number - (chunk.next_number if line.incarnation == chunk.incarnation else 0)
            chunk.incarnation, chunk.next_number = line.incarnation, line.number + 1
        if job.log_lines_dropped:
            job.log_lines_dropped += 1 + max(0, lost)
            return []
        size = len(line.text.encode()) + 1
        if job.log_bytes + size > job.log_limit_bytes:
            job.log_lines_dropped = 1
            return [(line.seconds, self._tell_of_limit())]
        job.log_bytes += size
        kept = [(line.seconds, line.text)]
        if lost > 0:
            note = f"[dray] {lost} lines were lost here: they came faster than they were fetched"
            kept.insert(0, (line.seconds, note))
        return kept

    def _tell_of_limit(self) -> str:
        message = (
            f"the job's log has reached its limit of {self._job.log_limit_bytes} bytes; "
            "further lines are counted, not kept"
        )
        remark(
            self._session,
            self._job,
            type_="log_limit",
            code="log_limit",
            message=message,
            now=self._now,
        )
        return f"[dray] {message}"

    def _begin(self, rank: int, before: LogChunkRow | None) -> LogChunkRow:
        chunk = LogChunkRow(
            job_id=self._job.id,
            attempt=self._attempt.attempt,
            rank=rank,
            first_line=0 if before is None else before.first_line + before.num_lines,
            num_lines=0,
            size_bytes=0,
            incarnation=0 if before is None else before.incarnation,
            next_number=0 if before is None else before.next_number,
            text="",
        )
        repository.add_log_chunk(self._session, chunk)
        return chunk

    def _close(self, chunk: LogChunkRow, text: str) -> None:
        key = chunk_key(chunk)
        self._storage.write_bytes(key, text.encode())
        chunk.text, chunk.storage_key = None, key
