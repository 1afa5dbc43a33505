"""Stores samples of jobs' system metrics, later averages them, and reads series from the samples
and the averages.

System metrics are stored separately from the metrics that ranks report. System metrics are recorded
over time instead of steps, so no attempt replaces values of another attempt, and the number of
samples is bounded no matter how long a job runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.supervisor_frames import SystemMetricsReport
from service.db.models import SystemMetricsRow
from service.db.repositories.telemetry import system_metrics as repository
from service.domain.series import downsample
from service.domain.system_metrics import (
    LONE_SAMPLES,
    MAX_SAMPLES,
    SAMPLES_OF_ROW,
    SystemSamples,
    first_rank,
    joined,
    of_report,
    pack,
    thinned,
    unpack,
)
from service.lifecycle import usage
from service.telemetry.known_attempts import KnownAttempt


def store(
    session: Session, job_id: str, time: int, report: SystemMetricsReport, known: KnownAttempt
) -> None:
    """Store a sample taken at `time`. `known` contains cached facts about the attempt, and is kept
    up to date."""
    columns = ((part.ranks, part.values) for part in report.columns)
    for rank, samples in of_report(time, columns).items():
        repository.add(session, _row(job_id, rank, samples, is_lone=True, mean_of=1))
    known.num_lone_samples += 1
    if known.num_lone_samples >= max(LONE_SAMPLES, known.mean_of):
        close(session, job_id, known)


def close(session: Session, job_id: str, known: KnownAttempt) -> None:
    """Join the rows that have only one sample, once there are many such rows or the attempt has
    ended."""
    if known.num_lone_samples:
        known.num_lone_samples = 0
        for rank in repository.first_ranks_of_lone(session, job_id):
            known.mean_of = _join(session, job_id, rank)


def _join(session: Session, job_id: str, rank: int) -> int:
    """Join a rank's rows, and return how many samples are now averaged into one."""
    rows = repository.rows_of(session, job_id, rank)
    whole = [row for row in rows if not row.is_lone]
    mean_of = max((row.mean_of for row in whole), default=1)
    taken = repository.take(session, [row.id for row in rows if row.is_lone])
    lone = joined(map(unpack, taken))
    usage.samples_joined(session, job_id, lone)
    samples = thinned(lone, mean_of)
    if sum(row.num_samples for row in whole) + len(samples.times) > MAX_SAMPLES:
        earlier = repository.take(session, [row.id for row in whole])
        samples = thinned(joined([*map(unpack, earlier), samples]), 2)
        mean_of *= 2
    elif whole and whole[-1].num_samples + len(samples.times) <= SAMPLES_OF_ROW:
        (last,) = repository.take(session, [whole[-1].id])
        samples = joined([unpack(last), samples])
    for start in range(0, len(samples.times), SAMPLES_OF_ROW):
        part = samples.of(start, start + SAMPLES_OF_ROW)
        repository.add(session, _row(job_id, rank, part, is_lone=False, mean_of=mean_of))
    return mean_of


def _row(
    job_id: str, rank: int, samples: SystemSamples, *, is_lone: bool, mean_of: int
) -> SystemMetricsRow:
    return SystemMetricsRow(
        job_id=job_id,
        first_rank=rank,
        is_lone=is_lone,
        mean_of=mean_of,
        num_samples=len(samples.times),
        last_time=samples.times[-1],
        points=pack(samples),
    )


def read(
    session: Session,
    job_id: str,
    *,
    keys: Sequence[str] | None,
    rank: int,
    after_time: int,
    max_points: int,
) -> views.SystemMetrics:
    """Return the series of a rank, and of its node if the rank is the lowest on its node."""
    rows = repository.points_after(session, job_id, first_rank(rank), after_time)
    samples = joined(unpack(row, rank) for row in rows)
    series = {}
    for (key, _), column in sorted(samples.columns.items()):
        points = {
            time: value
            for time, value in zip(samples.times, column, strict=True)
            if time > after_time and value == value
        }
        if points and (keys is None or key in keys):
            times, values = downsample([*points], [*points.values()], max_points)
            series[key] = views.SystemSeries(times=times, values=list(map(_shown, values)))
    return views.SystemMetrics(
        series=series, next_time=samples.times[-1] if samples.times else after_time
    )


def newest(session: Session, job_id: str) -> views.SystemSample:
    """Return the newest sample of every rank."""
    times: list[int] = []
    ranks: dict[int, dict[str, float]] = {}
    for samples in map(unpack, repository.newest_points(session, job_id)):
        times.append(samples.times[-1])
        for (key, rank), values in samples.columns.items():
            if values[-1] == values[-1]:
                ranks.setdefault(rank, {})[key] = _shown(values[-1])
    return views.SystemSample(
        time=max(times, default=None),
        ranks=[views.RankSample(rank=r, values=values) for r, values in sorted(ranks.items())],
    )


def _shown(value: float) -> float:
    """Round to the precision of a float32."""
    return float(f"{value:.6g}")
