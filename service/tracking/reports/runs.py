"""Reads the runs of the charts and tables of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.filters import JobTable
from dray.report_requests import ChartBlock, RunBlock, TableBlock
from service.domain.charts.curves import colours_of, keys_for, names_of, position_on, smoothed
from service.domain.charts.svg import Chart, ChartCurve, dash_of, num_omitted
from service.domain.charts.ticks import number
from service.domain.series import Points, downsample
from service.domain.tracking.columns import parse_columns
from service.jobs import listing
from service.telemetry import metric_reader
from service.tracking.reports.parts import parameters_of

MAX_POINTS = 800
"""Maximum number of points of a curve, as on the web page."""
NO_VALUE = "\N{EN DASH}"


@dataclass(frozen=True)
class Selected:
    """The runs of a block."""

    jobs: Sequence[views.Job]
    notes: list[str] = field(default_factory=list)
    """Sentences about runs that are missing."""


@dataclass(frozen=True)
class RunTable:
    columns: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[str]]]
    """(name, job id, values)"""
    notes: Sequence[str]


def select(session: Session, block: RunBlock) -> Selected:
    """Return the runs that the block selects. Raises InvalidSearch."""
    parameters = parameters_of(block)
    limit = parameters.pop("limit")
    page = listing.page(session, JobTable(**parameters), limit=limit, after=None)
    if block.runs:
        by_id = {job.id: job for job in page.items}
        missing = [each for each in block.runs if each not in by_id]
        notes = [f"No job has the id {each}. It may have been deleted." for each in missing]
        return Selected([by_id[each] for each in block.runs if each in by_id], notes)
    if not page.items:
        return Selected([], ["No run matches."])
    more = page.next_cursor is not None
    return Selected(page.items, [f"More runs match. The first {limit} are shown."] if more else [])


def chart(session: Session, block: ChartBlock) -> tuple[Chart, Sequence[str]]:
    """Return the chart with all its points, and notes about what it doesn't show."""
    selected = select(session, block)
    names, colours = names_of(selected.jobs), colours_of(selected.jobs)
    found = {job.id: _series(session, job, block) for job in selected.jobs}
    starts = {each: min(xs[0] for xs, _ in of.values()) for each, of in found.items() if of}
    curves, notes = [], selected.notes
    for at, key in enumerate(block.metrics):
        without = []
        for job in selected.jobs:
            xs, ys = found[job.id].get(key, ([], []))
            if not xs:
                without.append(names[job.id])
                continue
            if block.x == "seconds":
                xs = [x - starts[job.id] for x in xs]
            soft = smoothed(xs, ys, block.smoothing) if block.smoothing else ys
            several = len(block.metrics) > 1
            curves.append(
                ChartCurve(
                    name=f"{names[job.id]}, {key}" if several else names[job.id],
                    colour=colours[job.id],
                    dash=dash_of(colours[job.id], at, len(block.metrics)),
                    xs=xs,
                    ys=soft,
                    raw=ys if block.smoothing else None,
                )
            )
        if without:
            by = "" if block.x == "step" else f" by {block.x}"
            notes.append(f"No values of {key}{by}: {', '.join(without)}.")
    is_log = block.scale == "log"
    for curve in curves:
        notes += _omitted(curve, is_log=is_log)
    metrics = ", ".join(block.metrics)
    return Chart(
        title=block.title or metrics,
        y_name=metrics,
        curves=curves,
        axis=block.x,
        is_log=is_log,
        y_min=block.y_min,
        y_max=block.y_max,
    ), notes


def _omitted(curve: ChartCurve, *, is_log: bool) -> list[str]:
    infinite, negative = num_omitted(curve, is_log=is_log)
    found = []
    if infinite:
        found.append(f"{curve.name}: {infinite} of the points are NaN or infinite.")
    if negative:
        found.append(
            f"{curve.name}: {negative} of the points are zero or negative, which a log scale can't "
            "show."
        )
    return found


def _series(
    session: Session, job: views.Job, block: ChartBlock
) -> Mapping[str, tuple[Sequence[float], Sequence[float]]]:
    """Return the positions and values of each metric of the chart that the job has, on the chart's
    x axis. For `seconds`, positions are Unix times."""
    keys = [*dict.fromkeys((*block.metrics, *keys_for(block.x)))]
    series: dict[str, Points] = metric_reader.read(
        session, job.id, keys=keys, rank=0, after_step=-1, max_points=MAX_POINTS
    )
    of_chart = {key: series[key] for key in block.metrics if key in series}
    if block.x in ("time", "seconds"):
        times = metric_reader.read_times(session, job.id, of_chart, max_points=MAX_POINTS)
        return {key: (times[key], of_chart[key][1]) for key in of_chart} if times else {}
    total_steps = None if job.progress is None else job.progress.total_steps
    position = position_on(block.x, series, job.spec, total_steps)
    if position is None:
        return {}
    return {key: ([position(step) for step in at], ys) for key, (at, ys) in of_chart.items()}


def sampled(curve: ChartCurve, most: int) -> list[tuple[float, float]]:
    """Return at most `most` of the curve's points, including the extremes, for a table."""
    indices = list(range(len(curve.xs)))
    kept, values = downsample(indices, list(curve.ys), most)
    return [(curve.xs[at], value) for at, value in zip(kept, values, strict=True)]


def table(session: Session, block: TableBlock) -> RunTable:
    selected = select(session, block)
    columns = [column.text for column in parse_columns(block.columns)]
    names = names_of(selected.jobs)
    rows = [
        (names[job.id], job.id, [_cell(job, name) for name in columns]) for job in selected.jobs
    ]
    times = [job.values_as_of for job in selected.jobs if job.values_as_of is not None]
    notes = list(selected.notes)
    if times:
        notes.append(f"Metrics of running jobs are as of {moment(min(times))}.")
    return RunTable(columns, rows, notes)


def _cell(job: views.Job, column: str) -> str:
    value: Any = (job.values or {}).get(column)
    if value is None:
        return NO_VALUE
    if column == "duration":
        return f"{number(value)} s"
    if column == "cost" and job.cost is not None:
        return f"{number(value)} {job.cost.currency}"
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return number(value) if math.isfinite(value) else str(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def moment(at: datetime) -> str:
    """Return a time in UTC, to the minute."""
    return at.strftime("%Y-%m-%d %H:%M UTC")
