"""Metrics on their way into chunks.

The steps of one series rise. A step that an attempt reports again is not stored: the first value
stays, which after a recovery in place equals the second one anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import lt
from typing import Any

from sqlalchemy.orm import Session

from dray.views import MetricValue
from service.db.models import AttemptRow, JobRow, MetricChunkRow
from service.db.repositories import chunks as repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories import open_chunks
from service.db.repositories.chunks import MetricChunk
from service.db.repositories.open_chunks import OpenChunk
from service.domain.series import (
    CHUNK_POINTS,
    Points,
    Summary,
    append,
    outline,
    pack,
    summarise,
    tail,
    whole_blocks,
)
from service.lifecycle.transitions import remark

MAX_KEYS = 1000
"""Different metric names of one job; more are refused, and an event says so."""


class MetricStore:
    """Collects the points of one reply, then appends them to the open chunks."""

    def __init__(self, session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
        self._session = session
        self._job = job
        self._attempt = attempt
        self._now = now
        self._points: dict[tuple[str, int], Points] = {}
        self._may_repeat: set[tuple[str, int]] = set()

    def extend(
        self, key: str, rank: int, steps: Sequence[int], values: Sequence[float], *, repeats: bool
    ) -> None:
        """`repeats`: the rank was started again within the attempt and may go back some steps."""
        name = (key, rank)
        points = self._points.get(name)
        if points is None:
            points = self._points[name] = ([], [])
        points[0].extend(steps)
        points[1].extend(values)
        if repeats:
            self._may_repeat.add(name)

    def store(self) -> Mapping[tuple[str, int], Points]:
        """Answers the points that were stored, by metric and rank."""
        stored: dict[tuple[str, int], Points] = {}
        if not self._points:
            return stored
        ranks = {rank for _, rank in self._points}
        open_ = open_chunks.newest(self._session, self._job.id, self._attempt.attempt, ranks)
        allowed = self._allowed_keys({key for key, _ in self._points}, {key for key, _ in open_})
        summary = dict(self._job.summary)
        changed: list[OpenChunk] = []
        for (key, rank), points in self._points.items():
            if key not in allowed:
                continue
            chunk = open_.get((key, rank))
            steps, values = self._rising(key, rank, points, chunk)
            if not steps:
                continue
            changed += appended(key, rank, chunk, steps, values)
            stored[key, rank] = steps, values
            if rank == 0:
                summary[key] = by_name(values[-1])
        open_chunks.store(self._session, self._job.id, self._attempt.attempt, changed)
        self._job.summary = summary
        self._points = {}
        return stored

    def _allowed_keys(self, reported: set[str], known: set[str]) -> set[str]:
        if reported <= known:
            return reported
        known = repository.metric_keys(self._session, self._job.id)
        unknown = sorted(reported - known)
        room = max(0, MAX_KEYS - len(known))
        admitted = set(unknown[:room])
        self._job.num_metric_keys = len(known) + len(admitted)
        if len(unknown) > room:
            self._remark_once(
                "metric_keys_limit",
                f"the job reports more than {MAX_KEYS} different metrics; "
                f"{unknown[room]!r} and further ones are not stored",
            )
        return (reported & known) | admitted

    def _rising(self, key: str, rank: int, points: Points, chunk: OpenChunk | None) -> Points:
        """The points whose step is above all before it."""
        last = -1 if chunk is None else chunk.last_step
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
                f"{key!r} was reported again for a step that it already had, or for one before; "
                "the first value stays (steps must rise within an attempt)",
            )
        return steps, values

    def _remark_once(self, type_: str, message: str) -> None:
        if not jobs_repository.has_event(self._session, self._job.id, type_):
            remark(
                self._session, self._job, type_=type_, code=type_, message=message, now=self._now
            )


def appended(
    key: str, rank: int, chunk: OpenChunk | None, steps: list[int], values: list[float]
) -> list[OpenChunk]:
    """The chunks that change when these points come after the newest chunk, or begin a series."""
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


def summary_of(chunk: OpenChunk | MetricChunkRow | MetricChunk) -> Summary:
    """As the chunk's row holds it."""
    return Summary(
        count=chunk.count,
        first=(chunk.first_step, _or_nan(chunk.first_value)),
        last=(chunk.last_step, _or_nan(chunk.last_value)),
        low=_extreme(chunk.min_step, chunk.min_value),
        high=_extreme(chunk.max_step, chunk.max_value),
        nan_step=chunk.nan_step,
    )


def _begun(key: str, rank: int, steps: list[int], values: list[float]) -> OpenChunk:
    return OpenChunk(
        key=key,
        rank=rank,
        is_open=True,
        points=pack(steps, values),
        outline=outline(steps, values),
        **_columns(summarise(steps, values)),
    )


def _add(chunk: OpenChunk, steps: list[int], values: list[float]) -> None:
    """Add points to a chunk; only they, and the block that they begin in, are summarised."""
    blocks, known = whole_blocks(chunk.outline, chunk.count)
    chunk.points = append(chunk.points, steps, values)
    chunk.outline = blocks + outline(*tail(chunk.points, known))
    for name, value in _columns(summary_of(chunk).then(summarise(steps, values))).items():
        setattr(chunk, name, value)


def _columns(summary: Summary) -> dict[str, Any]:
    min_step, min_value = summary.low or (None, None)
    max_step, max_value = summary.high or (None, None)
    return {
        "count": summary.count,
        "first_step": summary.first[0],
        "first_value": _unless_nan(summary.first[1]),
        "last_step": summary.last[0],
        "last_value": _unless_nan(summary.last[1]),
        "min_step": min_step,
        "min_value": min_value,
        "max_step": max_step,
        "max_value": max_value,
        "nan_step": summary.nan_step,
    }


def _extreme(step: int | None, value: float | None) -> tuple[int, float] | None:
    return None if step is None or value is None else (step, value)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _unless_nan(value: float) -> float | None:
    return None if value != value else value


def by_name(value: float) -> MetricValue:
    """A number as JSON holds it: NaN and the infinities by name."""
    if math.isfinite(value):
        return value
    return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
