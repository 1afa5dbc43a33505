"""Writes metrics into rows of recent points, and later moves the points into chunks.

The steps of a series increase. If an attempt reports a step again, the first value is kept. After
an in-place recovery, the second value equals the first value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import lt

from sqlalchemy.orm import Session

from service.db.models import AttemptRow, JobRow
from service.db.repositories import events as events_repository
from service.db.repositories.submission import sweeps
from service.db.repositories.telemetry import chunks as repository
from service.db.repositories.telemetry import metric_summaries, open_chunks, recent_metrics
from service.db.repositories.telemetry.metric_summaries import MetricSummary, SummaryOf
from service.db.repositories.telemetry.open_chunks import OpenChunk
from service.domain.series import (
    CHUNK_POINTS,
    TIMES,
    Points,
    Series,
    Summary,
    append,
    join,
    outline,
    pack,
    pack_row,
    summarise,
    tail,
    unpack_row,
    whole_blocks,
)
from service.domain.tracking.metric_directions import is_minimised
from service.lifecycle.transitions import remark
from service.telemetry import metric_reader
from service.telemetry.chunk_columns import by_name, columns_of, summary_of
from service.telemetry.known_attempts import KnownAttempt

MAX_KEYS = 1000
"""Maximum number of metric names of one job. Any further names are refused, and an event is
added."""
MAX_ROWS, MAX_ROWS_BYTES = 64, 64 * 1024
"""Maximum number of rows and bytes of an attempt in `recent_metrics`. When either maximum is
reached, the points are moved to chunks."""


class MetricStore:
    """Collects the points of one reply, then stores them.

    Points of existing series are stored together as one row. The points of many rows are moved to
    chunks together, because appending to a chunk rewrites the entire chunk. The first points of a
    series, and large numbers of points, are written to chunks directly.
    """

    def __init__(
        self,
        session: Session,
        job: JobRow,
        attempt: AttemptRow,
        now: datetime,
        known: KnownAttempt,
    ) -> None:
        """`known` contains cached facts about the attempt, and is kept up to date."""
        self._session = session
        self._job = job
        self._attempt = attempt
        self._now = now
        self._known = known
        self._points: dict[Series, Points] = {}
        self._may_repeat: set[Series] = set()

    def extend(
        self, key: str, rank: int, steps: Sequence[int], values: Sequence[float], *, repeats: bool
    ) -> None:
        """Add points. `repeats` is set if the rank was restarted, and can therefore repeat
        steps."""
        name = (key, rank)
        points = self._points.get(name)
        if points is None:
            points = self._points[name] = ([], [])
        points[0].extend(steps)
        points[1].extend(values)
        if repeats:
            self._may_repeat.add(name)

    def store(self) -> Mapping[Series, Points]:
        """Store the collected points. Return the points that were stored, by metric and rank."""
        if not self._points:
            return {}
        known = self._known
        begun = self._points.keys() - known.last_steps.keys()
        stored = self._new_points(self._allowed() if begun else self._points)
        row = pack_row(stored)
        is_much = known.num_rows >= MAX_ROWS or known.num_bytes + len(row) > MAX_ROWS_BYTES
        if is_much or not begun.isdisjoint(stored):
            self._append(stored)
        elif stored:
            last_step = max(steps[-1] for steps, _ in stored.values())
            recent_metrics.add(self._session, *self._key, last_step, row)
            known.num_rows += 1
            known.num_bytes += len(row)
        self._points = {}
        self._summarise(begins=any(rank == 0 for _, rank in begun & stored.keys()))
        return stored

    def close(self) -> None:
        """Move all points to chunks, at the end of the attempt."""
        if self._known.num_rows:
            self._append({})
        self._summarise(begins=True)

    def _summarise(self, *, begins: bool) -> None:
        """Store summaries of new points periodically, and when a series begins or ends."""
        known, now = self._known, self._now
        if begins and self._attempt.attempt > 1:
            # Replace all summaries, because steps of earlier attempts may no longer be valid.
            self._session.flush()
            summaries = metric_reader.summaries(self._session, self._job.id)
            metric_summaries.replace(self._session, self._summarised(), _as_rows(summaries))
        elif known.summaries and (begins or known.are_summaries_due(now)):
            rows = _as_rows(known.summaries)
            metric_summaries.merge(self._session, self._summarised(), rows)
        else:
            return
        known.summaries, known.summarised_at = {}, now

    def _summarised(self) -> SummaryOf:
        """Return the job whose series are summarised. A sweep can state whether lower values of its
        metric are better; otherwise, the metric's name decides."""
        array_id = self._job.array_id
        sweep = None if array_id is None else sweeps.get(self._session, array_id)
        stated = {} if sweep is None else {sweep.sweep["metric"]: sweep.sweep["mode"]}

        def minimised(key: str) -> bool:
            mode = stated.get(key)
            return is_minimised(key) if mode is None else mode == "min"

        return SummaryOf(self._job.id, minimised, self._now)

    @property
    def _key(self) -> tuple[str, int]:
        return self._job.id, self._attempt.attempt

    def _new_points(self, points: Mapping[Series, Points]) -> dict[Series, Points]:
        """Return the points to store, and update the last steps and the job's summary."""
        stored: dict[Series, Points] = {}
        summary = dict(self._job.summary)
        for (key, rank), reported in points.items():
            steps, values = self._rising(key, rank, reported)
            if not steps:
                continue
            stored[key, rank] = steps, values
            self._known.last_steps[key, rank] = steps[-1]
            if rank == 0 and key != TIMES:
                summary[key] = by_name(values[-1])
                self._known.summarise(key, steps, values)
        self._job.summary = summary
        return stored

    def _append(self, stored: Mapping[Series, Points]) -> None:
        """Move the points in the rows of `recent_metrics` to chunks, then append `stored`."""
        session, known = self._session, self._known
        points: dict[Series, Points] = {}
        if known.num_rows:
            for row in recent_metrics.take(session, *self._key):
                join(points, unpack_row(row))
            known.num_rows = known.num_bytes = 0
        join(points, stored)
        newest = open_chunks.newest(session, *self._key, {rank for _, rank in points})
        changed: list[OpenChunk] = []
        for (key, rank), (steps, values) in points.items():
            changed += appended(key, rank, newest.get((key, rank)), steps, values)
        open_chunks.store(session, *self._key, changed)

    def _allowed(self) -> dict[Series, Points]:
        """Return the reported points whose names are allowed."""
        known = {key for key, _ in self._known.last_steps}
        allowed = self._allowed_keys({key for key, _ in self._points}, known)
        return {series: points for series, points in self._points.items() if series[0] in allowed}

    def _allowed_keys(self, reported: set[str], known: set[str]) -> set[str]:
        if reported <= known:
            return reported
        known = repository.metric_keys(self._session, self._job.id) - {TIMES}
        unknown = sorted(reported - known - {TIMES})
        num_free = max(0, MAX_KEYS - len(known))
        admitted = set(unknown[:num_free])
        self._job.num_metric_keys = len(known) + len(admitted)
        if len(unknown) > num_free:
            self._remark_once(
                "metric_keys_limit",
                f"the job reports more than {MAX_KEYS} different metrics; "
                f"{unknown[num_free]!r} and any further metrics are not stored",
            )
        return (reported & (known | {TIMES})) | admitted

    def _rising(self, key: str, rank: int, points: Points) -> Points:
        """Return the points whose step is higher than all earlier steps."""
        last = self._known.last_steps.get((key, rank), -1)
        if points[0][0] > last and all(map(lt, points[0], points[0][1:])):
            return points
        steps: list[int] = []
        values: list[float] = []
        for step, value in zip(*points, strict=True):
            if step > last:
                steps.append(step)
                values.append(value)
                last = step
        if len(steps) < len(points[0]) and (key, rank) not in self._may_repeat:
            self._remark_once(
                "metric_steps_repeated",
                f"{key!r} was reported for a step that is not after the metric's last step; the "
                "first value is kept (steps must increase within an attempt)",
            )
        return steps, values

    def _remark_once(self, type_: str, message: str) -> None:
        if not events_repository.has_event(self._session, self._job.id, type_):
            remark(
                self._session, self._job, type_=type_, code=type_, message=message, now=self._now
            )


def appended(
    key: str, rank: int, chunk: OpenChunk | None, steps: list[int], values: list[float]
) -> list[OpenChunk]:
    """Append points to the newest chunk, or begin a series. Returns the changed and new chunks."""
    changed = [] if chunk is None else [chunk]
    if chunk is not None and chunk.count < CHUNK_POINTS:
        take = CHUNK_POINTS - chunk.count
        _add(chunk, steps[:take], values[:take])
        steps, values = steps[take:], values[take:]
    while steps:
        if chunk is not None:
            chunk.is_open = False
        chunk = _begun(key, rank, steps[:CHUNK_POINTS], values[:CHUNK_POINTS])
        changed.append(chunk)
        steps, values = steps[CHUNK_POINTS:], values[CHUNK_POINTS:]
    return changed


def _begun(key: str, rank: int, steps: list[int], values: list[float]) -> OpenChunk:
    return OpenChunk(
        key=key,
        rank=rank,
        is_open=True,
        points=pack(steps, values),
        outline=outline(steps, values),
        **columns_of(summarise(steps, values)),
    )


def _add(chunk: OpenChunk, steps: list[int], values: list[float]) -> None:
    """Add points to a chunk, and update its summary and outline. Only the new points, and the block
    in which they begin, are summarised."""
    blocks, known = whole_blocks(chunk.outline, chunk.count)
    chunk.points = append(chunk.points, steps, values)
    chunk.outline = blocks + outline(*tail(chunk.points, known))
    for name, value in columns_of(summary_of(chunk).then(summarise(steps, values))).items():
        setattr(chunk, name, value)


def _as_rows(summaries: Mapping[str, Summary]) -> dict[str, MetricSummary]:
    names = MetricSummary.__dataclass_fields__
    rows = {}
    for key, summary in summaries.items():
        columns = columns_of(summary)
        rows[key] = MetricSummary(**{name: columns[name] for name in names})
    return rows
