"""Reads series. Each step is read only once, from the attempt whose value is valid, and long series
are downsampled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import attrgetter

from sqlalchemy.orm import Session

from dray import views
from service.checkpoints.catalog import began_at_step
from service.db.repositories import attempts as attempts_repository
from service.db.repositories.telemetry import chunks as repository
from service.db.repositories.telemetry import recent_metrics
from service.db.repositories.telemetry.chunks import MetricChunk
from service.db.types import storable
from service.domain.attempts.lineage import NO_END, last_steps
from service.domain.series import (
    BLOCK_POINTS,
    CHUNK_POINTS,
    TIMES,
    Points,
    Series,
    Summary,
    downsample,
    join,
    outlined,
    pack,
    summarise,
    times_at,
    unpack,
    unpack_row,
)
from service.telemetry.chunk_columns import by_name, columns_of, summary_of

Piece = tuple[MetricChunk, int]
"""A chunk, and its last valid step."""
Recent = Mapping[int, tuple[MetricChunk, bytes]]
"""Points that are not yet in chunks, represented by one artificial chunk per series and attempt,
with a negative id."""


def asked_keys(session: Session, job_id: str, texts: Sequence[str]) -> list[str] | None:
    """Return the keys in `texts`, or None if there are none. Each string is a key, which can
    contain commas, or a list of keys separated by commas."""
    has_commas = any("," in text for text in texts)
    known = repository.metric_keys(session, job_id) if has_commas else frozenset()
    keys = [key for text in texts for key in ([text] if text in known else text.split(",")) if key]
    return [key for key in keys if storable(key)] if keys else None


def read(
    session: Session,
    job_id: str,
    *,
    keys: Sequence[str] | None,
    rank: int,
    after_step: int,
    until_step: int = NO_END,
    max_points: int,
) -> dict[str, Points]:
    """Read at most `max_points` points of each series, from the steps after `after_step` up to
    `until_step`.

    `TIMES` is read only if `keys` contains it.
    """
    pieces, recent = _pieces(session, job_id, rank, keys, after_step, until_step)
    whole: set[int] = set()
    in_blocks: set[int] = set()
    for found in pieces.values():
        _choose_detail(found, after_step, max_points, whole, in_blocks)
    points = _points(session, whole, recent)
    outlines = repository.metric_outlines(session, in_blocks)
    series: dict[str, Points] = {}
    for key, found in pieces.items():
        steps, values = _join(found, points, outlines, after_step)
        if steps:
            series[key] = downsample(steps, values, max_points)
    return series


def read_in_order(
    session: Session,
    job_id: str,
    *,
    keys: Sequence[str] | None,
    rank: int,
    after_step: int,
    until_step: int = NO_END,
    max_points: int,
) -> tuple[dict[str, Points], int | None]:
    """Read every point of each series after `after_step`, up to a common last step.

    The last step is chosen so that no series has more than `max_points` points. Returns the series
    and this step. The step is None if there are no more points up to `until_step`. No more chunks
    are read than needed, however long the series are.
    """
    pieces, recent = _pieces(session, job_id, rank, keys, after_step, until_step)
    needed = {key: _first(found, after_step, max_points) for key, found in pieces.items()}
    chosen = {chunk.id for found in needed.values() for chunk, _ in found}
    points = _points(session, chosen, recent)
    series = {key: _join(found, points, {}, after_step) for key, found in needed.items()}
    ends = [
        steps[min(max_points, len(steps)) - 1]
        for key, (steps, _) in series.items()
        if len(steps) > max_points or (steps and len(needed[key]) < len(pieces[key]))
    ]
    end = min(ends, default=None)
    if end is None:
        return {key: found for key, found in series.items() if found[0]}, None
    cut = {}
    for key, (steps, values) in series.items():
        stop = bisect_right(steps, end)
        if stop:
            cut[key] = steps[:stop], values[:stop]
    return cut, end


def _first(pieces: Sequence[Piece], after_step: int, max_points: int) -> list[Piece]:
    """Return the leading pieces that are needed to get `max_points` points."""
    count, found = 0, []
    for piece in pieces:
        if count >= max_points:
            break
        found.append(piece)
        chunk, end = piece
        # Don't count the points of a chunk that extends beyond the range: it is unknown how many
        # are within the range.
        is_whole = chunk.first_step > after_step and chunk.last_step <= end
        count += chunk.count if is_whole else 0
    return found


def _points(session: Session, chosen: set[int], recent: Recent) -> dict[int, bytes]:
    """Return the points of the chosen chunks, and all recent points."""
    points = repository.metric_points(session, chosen - recent.keys())
    return points | {number: packed for number, (_, packed) in recent.items()}


def summaries(session: Session, job_id: str) -> dict[str, Summary]:
    """Return the summary of each series of rank 0 over its valid steps."""
    pieces, recent = _pieces(session, job_id, 0, None, -1)
    cut = {chunk.id for found in pieces.values() for chunk, end in found if chunk.last_step > end}
    points = _points(session, cut, recent)

    def summary(chunk: MetricChunk, end: int) -> Summary:
        if chunk.last_step <= end:
            return summary_of(chunk)
        steps, values = unpack(points[chunk.id])
        stop = bisect_right(steps, end)
        return summarise(steps[:stop], values[:stop])

    return {
        key: reduce(Summary.then, (summary(chunk, end) for chunk, end in found))
        for key, found in pieces.items()
        if found
    }


def _pieces(
    session: Session,
    job_id: str,
    rank: int,
    keys: Sequence[str] | None,
    after_step: int,
    until_step: int = NO_END,
) -> tuple[dict[str, list[Piece]], Recent]:
    """Return the pieces of each series that contain valid steps, and the recent points."""
    attempts = attempts_repository.beginnings(session, job_id)
    starts = {row.attempt: began_at_step(row) for row in attempts}
    chunks = repository.metric_chunks(session, job_id, rank, keys, after_step)
    recent = _recent(session, job_id, rank, keys, after_step)
    if recent:
        chunks = sorted([*chunks, *(chunk for chunk, _ in recent.values())], key=_in_order)
    first: dict[tuple[str, int], int] = {}
    if len(attempts) > 1:
        first = repository.first_metric_steps(session, job_id, rank, min(starts))
    pieces = {
        key: _counting(list(group), starts, first, until_step)
        for key, group in groupby(chunks, key=attrgetter("key"))
        if keys is not None or key != TIMES
    }
    return pieces, recent


def _recent(
    session: Session, job_id: str, rank: int, keys: Sequence[str] | None, after_step: int
) -> Recent:
    found: dict[int, dict[Series, Points]] = {}
    for row in recent_metrics.of_job(session, job_id, after_step):
        join(found.setdefault(row.attempt, {}), unpack_row(row.points, rank))
    series = [
        (key, attempt, points)
        for attempt, of_attempt in found.items()
        for (key, _), points in of_attempt.items()
        if keys is None or key in keys
    ]
    return {
        -number: (
            MetricChunk(
                id=-number,
                key=key,
                attempt=attempt,
                has_outline=False,
                **columns_of(summarise(*points)),
            ),
            pack(*points),
        )
        for number, (key, attempt, points) in enumerate(series, 1)
    }


def _in_order(chunk: MetricChunk) -> tuple[str, int, int]:
    return chunk.key, chunk.attempt, chunk.first_step


def read_times(
    session: Session, job_id: str, series: Mapping[str, Points], *, max_points: int
) -> dict[str, list[float]] | None:
    """Return the Unix time of each point; None for a job from an older version of dray, which
    stored no times.

    Times are exact if there are at most `max_points` steps between the first and the last point.
    """
    first = min((steps[0] for steps, _ in series.values()), default=0)
    last = max((steps[-1] for steps, _ in series.values()), default=0)
    found = read(
        session,
        job_id,
        keys=[TIMES],
        rank=0,
        after_step=first - 1,
        until_step=last,
        max_points=max_points,
    )
    known = found.get(TIMES)
    if known is None:
        return None
    return {key: times_at(steps, known) for key, (steps, _) in series.items()}


def as_view(
    series: Mapping[str, Points],
    times: Mapping[str, list[float]] | None = None,
    *,
    after_step: int,
    end: int | None,
    live: bool,
) -> views.Metrics:
    """Build the answer. For a live job, `next_step` is chosen so that the next call returns the
    newest step again, because some of its series may not have been reported yet.

    If there are more points, `end` is the step up to which the response is complete.
    """
    newest = max((steps[-1] for steps, _ in series.values()), default=after_step)
    next_step = max(after_step, newest - 1) if live else newest
    next_step = next_step if end is None else end
    return views.Metrics(
        series={
            key: views.Series(
                steps=steps, values=[by_name(value) for value in values], times=times and times[key]
            )
            for key, (steps, values) in sorted(series.items())
        },
        next_step=next_step,
    )


def _counting(
    chunks: Sequence[MetricChunk],
    starts: Mapping[int, int | None],
    first: Mapping[tuple[str, int], int],
    until_step: int,
) -> list[Piece]:
    """Return the chunks of a series that contain valid steps, ordered by step.

    `first` is the first step of each series in each attempt except the first attempt. An attempt
    that reports a value for the step from which it resumed also replaces the earlier value of this
    step. An attempt whose start is unknown replaces steps only in the series that it reports.
    """
    took_over: dict[int, int | None] = {}
    for attempt, start in starts.items():
        own = first.get((chunks[0].key, attempt))
        known = [at for at in (start, None if own is None else own - 1) if at is not None]
        took_over[attempt] = start if own is None else min(known)
    ends = {attempt: min(end, until_step) for attempt, end in last_steps(took_over).items()}
    return [
        (chunk, ends[chunk.attempt]) for chunk in chunks if chunk.first_step <= ends[chunk.attempt]
    ]


def _choose_detail(
    pieces: Sequence[Piece],
    after_step: int,
    max_points: int,
    whole: set[int],
    in_blocks: set[int],
) -> None:
    """Add the ids of chunks that must be read in full to `whole`, and the ids of chunks of which
    only the outline is needed to `in_blocks`.

    If the series has far more points than the response, a block or even a chunk falls into one or
    two buckets, so that only its extremes are needed. A chunk of which only a part is returned is
    always read in full.
    """
    count = sum(chunk.count for chunk, _ in pieces)
    for chunk, end in pieces:
        is_cut = chunk.last_step > end or chunk.first_step <= after_step
        if is_cut or count <= BLOCK_POINTS * max_points // 2:
            whole.add(chunk.id)
        elif count <= CHUNK_POINTS * max_points // 2:
            (in_blocks if chunk.has_outline else whole).add(chunk.id)


def _join(
    pieces: Sequence[Piece],
    points: Mapping[int, bytes],
    outlines: Mapping[int, bytes],
    after_step: int,
) -> Points:
    steps: list[int] = []
    values: list[float] = []
    for chunk, end in pieces:
        if chunk.id in points:
            chunk_steps, chunk_values = unpack(points[chunk.id])
            begin, stop = bisect_right(chunk_steps, after_step), bisect_right(chunk_steps, end)
            steps += chunk_steps[begin:stop]
            values += chunk_values[begin:stop]
            continue
        # The response must contain the series' first and last points, so keep the ends of each
        # chunk.
        ends = summary_of(chunk)
        inner = outlined(outlines[chunk.id]) if chunk.id in outlines else ends.points()
        for step, value in (ends.first, *inner, ends.last):
            if not steps or step > steps[-1]:
                steps.append(step)
                values.append(value)
    return steps, values
