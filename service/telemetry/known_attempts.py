"""A cache of stored facts about live attempts, so that replies can be stored without first reading
these facts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.db.repositories.telemetry import chunks, open_chunks, recent_metrics, system_metrics
from service.domain.series import TIMES, Series, Summary, summarise, unpack_row

SUMMARISE_AFTER = timedelta(seconds=20)
"""Minimum interval between two updates of the stored summaries. Storing the summaries with each
reply would cost more than storing the points."""
MAX_STREAMS = 400_000
"""Maximum number of series and logs in the cache. If this number is exceeded, the attempts that
were stored least recently are removed."""


@dataclass
class OpenLog:
    """The open end of a rank's log: one or more consecutive chunks in the database."""

    next_line: int
    """The number of the next line."""
    size_bytes: int
    num_chunks: int
    incarnation: int
    next_number: int


@dataclass
class KnownAttempt:
    """All series and open logs of an attempt."""

    last_steps: dict[Series, int] = field(default_factory=dict)
    num_rows: int = 0
    """Number of rows of the attempt in `recent_metrics`. Together, the rows contain `num_bytes`
    bytes of points."""
    num_bytes: int = 0
    logs: dict[int, OpenLog] = field(default_factory=dict)
    """Open logs by rank."""
    num_lone_samples: int = 0
    """Number of system metrics samples stored in rows that contain only one sample."""
    mean_of: int = 1
    """The number of original samples that the latest join averaged into one."""
    summaries: dict[str, Summary] = field(default_factory=dict)
    """Summaries, by key, of the points of rank 0 that may be missing in the stored summaries."""
    summarised_at: datetime | None = None
    """The time at which this process last stored the summaries."""

    def summarise(self, key: str, steps: Sequence[int], values: Sequence[float]) -> None:
        before, new = self.summaries.get(key), summarise(steps, values)
        self.summaries[key] = new if before is None else before.then(new)

    def are_summaries_due(self, now: datetime) -> bool:
        return self.summarised_at is None or now >= self.summarised_at + SUMMARISE_AFTER

    @property
    def num_streams(self) -> int:
        return len(self.last_steps) + len(self.logs)


class KnownAttempts:
    """The attempts that this process follows.

    An attempt's cursor shows whether these facts are current: any process that changes them changes
    the cursor in the same transaction.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[Mapping[str, int], KnownAttempt]] = {}
        self._num_streams = 0
        self._lock = threading.Lock()  # on PostgreSQL, several threads write

    def take(
        self, session: Session, job_id: str, attempt: int, cursor: Mapping[str, int]
    ) -> KnownAttempt:
        """Remove and return the facts of an attempt whose stored cursor is `cursor`. `keep` stores
        the facts again."""
        with self._lock:
            at, known = self._known.pop((job_id, attempt), ({}, KnownAttempt()))
            self._num_streams -= known.num_streams
        # An attempt that has no stored cursor has no stored facts either.
        return known if at == cursor else learn(session, job_id, attempt)

    def keep(
        self, job_id: str, attempt: int, cursor: Mapping[str, int], known: KnownAttempt
    ) -> None:
        """Put back changed facts. `cursor` is the cursor stored in the same transaction."""
        with self._lock:
            self._known[job_id, attempt] = cursor, known
            self._num_streams += known.num_streams
            while self._num_streams > MAX_STREAMS:
                _, forgotten = self._known.pop(next(iter(self._known)))
                self._num_streams -= forgotten.num_streams


def learn(session: Session, job_id: str, attempt: int) -> KnownAttempt:
    """Read the facts of an attempt, without the points and lines in its chunks."""
    known = KnownAttempt(open_chunks.last_steps(session, job_id, attempt))
    known.num_lone_samples = system_metrics.num_lone(session, job_id)
    for row in recent_metrics.of_attempt(session, job_id, attempt):
        known.num_rows += 1
        known.num_bytes += len(row)
        for (key, rank), (steps, values) in unpack_row(row).items():
            known.last_steps[key, rank] = steps[-1]
            if rank == 0 and key != TIMES:
                known.summarise(key, steps, values)
    for chunk in chunks.open_log_chunks(session, job_id, attempt):
        before = known.logs.get(chunk.rank)
        known.logs[chunk.rank] = OpenLog(
            next_line=chunk.first_line + chunk.num_lines,
            size_bytes=chunk.size_bytes + (before.size_bytes if before else 0),
            num_chunks=1 + (before.num_chunks if before else 0),
            incarnation=chunk.incarnation,
            next_number=chunk.next_number,
        )
    return known
