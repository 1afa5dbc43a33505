"""The served series: of every attempt what still counts, each step once, few points of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from sqlalchemy.orm import Session

from dray import views
from service.checkpoints import began_at_step
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import chunks as repository
from service.db.repositories.chunks import MetricChunk
from service.domain.lineage import last_steps
from service.domain.series import CHUNK_POINTS, Points, Summary, downsample, unpack
from service.metric_store import by_name

Piece = tuple[MetricChunk, int]
"""A chunk and the last step of it that counts."""


def read(
    session: Session,
    job_id: str,
    *,
    keys: Sequence[str] | None,
    rank: int,
    after_step: int,
    max_points: int,
) -> dict[str, Points]:
    """Each series' points with a step above `after_step`, at most `max_points` of each."""
    attempts = attempts_repository.of_job(session, job_id)
    starts = {row.attempt: began_at_step(row) for row in attempts}
    chunks = repository.metric_chunks(session, job_id, rank, keys)
    pieces = {
        key: _counting(list(group), starts, after_step)
        for key, group in groupby(chunks, key=attrgetter("key"))
    }
    whole: set[int] = set()
    for found in pieces.values():
        whole.update(_needed_whole(found, after_step, max_points))
    points = repository.metric_points(session, whole)
    series: dict[str, Points] = {}
    for key, found in pieces.items():
        steps, values = _join(found, points, after_step)
        if steps:
            series[key] = downsample(steps, values, max_points)
    return series


def as_view(series: Mapping[str, Points], *, after_step: int, live: bool) -> views.Metrics:
    """While the job is live its newest step is asked for again: more of it may be on the way."""
    newest = max((steps[-1] for steps, _ in series.values()), default=after_step)
    next_step = max(after_step, newest - 1) if live else newest
    return views.Metrics(
        series={
            key: views.Series(steps=steps, values=[by_name(value) for value in values])
            for key, (steps, values) in sorted(series.items())
        },
        next_step=next_step,
    )


def _counting(
    chunks: Sequence[MetricChunk], starts: Mapping[int, int | None], after_step: int
) -> list[Piece]:
    """The chunks of one series that hold steps which count, in order of steps.

    An attempt that reports the very step at which it resumed takes that one over, too.
    """
    first: dict[int, int] = {}
    for chunk in chunks:
        first.setdefault(chunk.attempt, chunk.first_step)
    took_over: dict[int, int | None] = {}
    for attempt, start in starts.items():
        known = [at for at in (start, first.get(attempt, 0) - 1) if at is not None]
        took_over[attempt] = min(known) if attempt in first else start
    ends = last_steps(took_over)
    return [
        (chunk, ends[chunk.attempt])
        for chunk in chunks
        if chunk.first_step <= ends[chunk.attempt] and chunk.last_step > after_step
    ]


def _needed_whole(pieces: Sequence[Piece], after_step: int, max_points: int) -> set[int]:
    """Chunks whose points are read one by one.

    When far more points are asked for than are answered, a chunk falls into one bucket or two, and
    its summary holds all that can be left of it; only chunks that are cut are then read.
    """
    count = sum(chunk.count for chunk, _ in pieces)
    if count <= CHUNK_POINTS * max_points // 2:
        return {chunk.id for chunk, _ in pieces}
    return {
        chunk.id for chunk, end in pieces if chunk.last_step > end or chunk.first_step <= after_step
    }


def _join(pieces: Sequence[Piece], points: Mapping[int, bytes], after_step: int) -> Points:
    steps: list[int] = []
    values: list[float] = []
    for chunk, end in pieces:
        there: Iterable[tuple[int, float]] = _summary(chunk).points()
        if chunk.id in points:
            there = zip(*unpack(points[chunk.id]), strict=True)
        for step, value in there:
            if after_step < step <= end:
                steps.append(step)
                values.append(value)
    return steps, values


def _summary(chunk: MetricChunk) -> Summary:
    return Summary(
        count=chunk.count,
        first=(chunk.first_step, _or_nan(chunk.first_value)),
        last=(chunk.last_step, _or_nan(chunk.last_value)),
        low=_extreme(chunk.min_step, chunk.min_value),
        high=_extreme(chunk.max_step, chunk.max_value),
        nan_step=chunk.nan_step,
    )


def _extreme(step: int | None, value: float | None) -> tuple[int, float] | None:
    return None if step is None or value is None else (step, value)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
