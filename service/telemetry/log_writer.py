"""Writes log lines into chunks.

The last chunks of each rank are in SQL. A full chunk is written to storage before its row is
changed (`service.storage.staged_files`). A chunk that the storage refuses because the job's own
folder is damaged remains in SQL (`service.telemetry.refused_logs`).

Beyond a job's log limit, only the newest lines of each rank are kept, in a chunk that
remains in SQL and from which the oldest lines are dropped. The chunk's first line states how many
lines are left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import AttemptRow, JobRow, LogChunkRow
from service.db.repositories.telemetry import chunks as repository
from service.domain.errors import FolderSpoilt, StorageUnavailable
from service.lifecycle.transitions import remark
from service.storage.staged_files import Files
from service.telemetry import refused_logs
from service.telemetry.known_attempts import KnownAttempt, OpenLog
from service.telemetry.log_lines import chunk_key, encode_line

CHUNK_BYTES = 64 * 1024
TAIL_BYTES = 128 * 1024
"""Maximum size of the newest lines that are kept for a rank whose log exceeds the limit."""
MAX_CHUNKS = 32
"""Maximum number of consecutive open chunks. If there are more chunks, they are joined."""


@dataclass(frozen=True)
class LogLine:
    """A line that a rank reported."""

    rank: int
    incarnation: int
    number: int
    """Number of the line within the incarnation, counted from 0 and including lost lines."""
    seconds: float
    text: str


class LogStore:
    """Collects the lines of one reply, then appends them to the open chunks.

    The lines of each reply become a new chunk of a known log, because appending to a chunk would
    rewrite the entire chunk. When there are `MAX_CHUNKS`, the chunks are joined.
    """

    def __init__(
        self,
        session: Session,
        storage: Files,
        job: JobRow,
        attempt: AttemptRow,
        now: datetime,
        known: KnownAttempt,
    ) -> None:
        """`known` contains cached facts about the attempt, and is kept up to date."""
        self._session = session
        self._storage = storage
        self._job = job
        self._attempt = attempt
        self._now = now
        self._known = known.logs
        self._lines: dict[int, list[LogLine]] = {}
        self._refusal: StorageUnavailable | None = None
        """The error that caused a chunk to remain in SQL. After such an error, no further chunks
        are written to storage."""

    def add(self, line: LogLine) -> None:
        self._lines.setdefault(line.rank, []).append(line)

    def store(self) -> None:
        """Append the added lines."""
        more = {rank: lines for rank, lines in self._lines.items() if not self._add(rank, lines)}
        last = self._last_chunks(more)
        for rank, lines in more.items():
            self._append(rank, last.get(rank), lines)
        self._lines = {}
        self._bound_refused()

    def close(self, lost: Mapping[int, int | None]) -> None:
        """Join the open chunks of each rank, and add a note about missing lines to the end of its
        log.

        `lost` maps each rank to the number of its lines that never arrived; None if the number is
        unknown.
        """
        split = {rank for rank, log in self._known.items() if log.num_chunks > 1}
        last = self._last_chunks({*lost, *split})
        has_silos = bool((self._job.spec.get("federated") or {}).get("silos"))
        for rank, number in lost.items():
            if has_silos and rank and number is None and rank not in last:
                continue  # a silo's lines stay on its node unless its owner releases them
            note = f"{number} lines were lost here: the disk of the node was full"
            if number is None:
                note = (
                    "lines of this log may be missing: a worker of this rank was lost together "
                    "with the lines that it had not sent yet"
                )
            self._job.log_lines_dropped += number or 0
            chunk = last.get(rank)
            entries = [] if chunk is None else _entries_of(chunk)
            if chunk is None or not _takes(chunk, is_tail=self._is_over_limit):
                chunk, entries = self._open(rank, chunk, entries, is_tail=self._is_over_limit)
            entries.append(encode_line(self._now.timestamp(), f"[dray] {note}", number or 0))
            self._save(chunk, entries)
        self._bound_refused()
        refused_logs.report_dropped(self._session, self._job, self._now)

    def _last_chunks(self, ranks: Collection[int]) -> dict[int, LogChunkRow]:
        """Return the newest chunk of each rank, joined with the open chunks that precede it."""
        if not ranks:
            return {}
        attempt = self._attempt.attempt
        found = repository.last_log_chunks(self._session, self._job.id, attempt, ranks)
        return {rank: self._joined(chunks) for rank, chunks in found.items()}

    def _joined(self, chunks: Sequence[LogChunkRow]) -> LogChunkRow:
        """Return the newest chunk. If the chunk is open, all open chunks are first joined into
        one."""
        newest, first = chunks[-1], chunks[0]
        if newest is first or not _takes(newest, is_tail=False):
            return newest
        first.text = "".join(chunk.text or "" for chunk in chunks)
        first.num_lines = sum(chunk.num_lines for chunk in chunks)
        first.size_bytes = sum(chunk.size_bytes for chunk in chunks)
        first.incarnation, first.next_number = newest.incarnation, newest.next_number
        for chunk in chunks[1:]:
            self._session.delete(chunk)
        return first

    def _add(self, rank: int, lines: Sequence[LogLine]) -> bool:
        """Add the lines as a new chunk. If this is not possible, returns False and changes
        nothing."""
        log, job = self._known.get(rank), self._job
        if log is None or log.num_chunks >= MAX_CHUNKS:
            return False
        if any(line.incarnation != log.incarnation for line in lines):
            return False
        numbers = [line.number for line in lines]
        if numbers != list(range(log.next_number, log.next_number + len(lines))):
            return False
        text = "".join(encode_line(line.seconds, line.text) for line in lines)
        size, read = len(text.encode()), sum(len(line.text.encode()) + 1 for line in lines)
        if log.size_bytes + size >= CHUNK_BYTES or job.log_bytes + read >= job.log_limit_bytes:
            return False
        job.log_bytes += read
        log.next_number += len(lines)
        repository.add_log_chunk(
            self._session,
            LogChunkRow(
                job_id=job.id,
                attempt=self._attempt.attempt,
                rank=rank,
                first_line=log.next_line,
                num_lines=len(lines),
                size_bytes=size,
                incarnation=log.incarnation,
                next_number=log.next_number,
                text=text,
            ),
        )
        log.next_line += len(lines)
        log.size_bytes += size
        log.num_chunks += 1
        return True

    def _append(self, rank: int, chunk: LogChunkRow | None, lines: list[LogLine]) -> None:
        entries = [] if chunk is None else _entries_of(chunk)
        for line in lines:
            is_tail = self._exceeds_limit(len(line.text.encode()) + 1)
            if chunk is None or not _takes(chunk, is_tail=is_tail):
                chunk, entries = self._open(rank, chunk, entries, is_tail=is_tail)
            new = [encode_line(line.seconds, line.text)]
            lost = _count(chunk, line)
            if lost > 0:
                self._job.log_lines_dropped += lost
                note = (
                    f"[dray] {lost} lines were lost here: they were written faster than they could "
                    "be fetched"
                )
                new.insert(0, encode_line(line.seconds, note, lost))
            entries += new
            chunk.size_bytes += sum(len(entry.encode()) for entry in new)
            if not is_tail and chunk.size_bytes >= CHUNK_BYTES:
                self._close(chunk, entries)
        if chunk is not None and _is_open(chunk):
            self._save(chunk, entries)
        self._know(rank, chunk)

    def _know(self, rank: int, chunk: LogChunkRow | None) -> None:
        """Store the newest chunk of a rank's log in the cache if another chunk can follow it."""
        self._known.pop(rank, None)
        if chunk is not None and _takes(chunk, is_tail=False):
            self._known[rank] = OpenLog(
                next_line=chunk.first_line + chunk.num_lines,
                size_bytes=chunk.size_bytes,
                num_chunks=1,
                incarnation=chunk.incarnation,
                next_number=chunk.next_number,
            )

    @property
    def _is_over_limit(self) -> bool:
        return self._job.log_bytes >= self._job.log_limit_bytes

    def _exceeds_limit(self, size: int) -> bool:
        """Whether a line of this size exceeds the limit. An event is added for the first such
        line."""
        job = self._job
        if job.log_bytes + size < job.log_limit_bytes:
            job.log_bytes += size
            return False
        if not self._is_over_limit:
            job.log_bytes = job.log_limit_bytes
            remark(
                self._session,
                job,
                type_="log_limit",
                code="log_limit",
                message=f"{self._limit_sentence}; of the later lines, only the newest lines of "
                "each rank are kept",
                now=self._now,
            )
        return True

    @property
    def _limit_sentence(self) -> str:
        return f"the job's log has reached its limit of {self._job.log_limit_bytes} bytes"

    def _open(
        self, rank: int, before: LogChunkRow | None, entries: list[str], *, is_tail: bool
    ) -> tuple[LogChunkRow, list[str]]:
        """Close the rank's last chunk, and return a new chunk that follows this chunk."""
        if before is not None and _is_open(before):
            self._close(before, entries)
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
            left_out=0 if is_tail else None,
        )
        repository.add_log_chunk(self._session, chunk)
        return chunk, []

    def _close(self, chunk: LogChunkRow, entries: list[str]) -> None:
        """Move a chunk to storage, or leave it in SQL if waiting for the storage would prevent the
        job from ending.

        If the storage accepts no files at all, the error is raised, so that the reply is requested
        again later. A job that is being cancelled does not wait, because it holds slots.
        """
        chunk.num_lines, text, key = len(entries), "".join(entries), chunk_key(chunk)
        try:
            if self._refusal is None:
                self._storage.write_bytes(key, text.encode())
                chunk.text, chunk.storage_key = None, key
                return
        except StorageUnavailable as error:
            is_cancelled = self._job.state == JobState.CANCELLING
            if not isinstance(error, FolderSpoilt) and not is_cancelled:
                raise
            self._refusal = error
        chunk.text, chunk.refused_at = text, self._now

    def _bound_refused(self) -> None:
        """Report once that chunks were refused, and drop the oldest chunks if the chunks exceed the
        limit."""
        if self._refusal is not None:
            refused_logs.bound(self._session, self._job, self._refusal, self._now)

    def _save(self, chunk: LogChunkRow, entries: list[str]) -> None:
        """Store the text of an open chunk in its SQL row."""
        if chunk.left_out is not None:
            entries = [self._trim(chunk, entries), *entries]
        chunk.text, chunk.num_lines = "".join(entries), len(entries)
        chunk.size_bytes = len(chunk.text.encode())

    def _trim(self, chunk: LogChunkRow, entries: list[str]) -> str:
        """Drop the oldest entries that exceed the limit, and return a line that states their
        number.

        The numbers of the other lines remain unchanged, because cursors contain them.
        """
        assert chunk.left_out is not None
        size, surplus = sum(len(entry.encode()) for entry in entries), 0
        while size > TAIL_BYTES:
            size -= len(entries[surplus].encode())
            _, _, *lost = json.loads(entries[surplus])
            chunk.left_out += lost[0] if lost else 1
            self._job.log_lines_dropped += 0 if lost else 1
            surplus += 1
        del entries[:surplus]
        chunk.first_line += surplus
        seconds = json.loads(entries[0])[0] if entries else self._now.timestamp()
        note = f"[dray] {chunk.left_out} lines are omitted here: {self._limit_sentence}"
        return encode_line(seconds, note)


def _entries_of(chunk: LogChunkRow) -> list[str]:
    """Return the lines of an open chunk, without the first line, which counts omitted lines."""
    lines = (chunk.text or "").split("\n")[:-1]
    return [line + "\n" for line in lines[0 if chunk.left_out is None else 1 :]]


def _is_open(chunk: LogChunkRow) -> bool:
    return chunk.storage_key is None and chunk.refused_at is None


def _takes(chunk: LogChunkRow, *, is_tail: bool) -> bool:
    return _is_open(chunk) and (chunk.left_out is not None) == is_tail


def _count(chunk: LogChunkRow, line: LogLine) -> int:
    """Count a line, and return how many lines before it were lost."""
    # The last lines of a replaced process can arrive after the first lines of its successor.
    if line.incarnation < chunk.incarnation:
        return 0
    expected = chunk.next_number if line.incarnation == chunk.incarnation else 0
    chunk.incarnation, chunk.next_number = line.incarnation, line.number + 1
    return line.number - expected
