"""Converts summaries of points to and from columns of a chunk's row, and values to JSON."""

from __future__ import annotations

import math
from typing import Any

from dray.views import MetricValue
from service.db.models import MetricChunkRow
from service.db.repositories.telemetry.chunks import MetricChunk
from service.db.repositories.telemetry.open_chunks import OpenChunk
from service.domain.series import Summary


def summary_of(chunk: OpenChunk | MetricChunkRow | MetricChunk) -> Summary:
    """Return the summary in the columns of a chunk."""
    return Summary(
        count=chunk.count,
        first=(chunk.first_step, _or_nan(chunk.first_value)),
        last=(chunk.last_step, _or_nan(chunk.last_value)),
        low=_extreme(chunk.min_step, chunk.min_value),
        high=_extreme(chunk.max_step, chunk.max_value),
        nan_step=chunk.nan_step,
    )


def columns_of(summary: Summary) -> dict[str, Any]:
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
    """Return a number that JSON can represent, or the name of NaN or an infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
