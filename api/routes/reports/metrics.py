"""/v1/jobs/{id}/metrics: downsampled series, and the resource usage of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, TheReading
from api.http.caching import answer
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["metrics"])


class MetricsQuery(Query):
    keys: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Series to return, as repeated parameters or separated by commas; by default all series. A
    value that is the name of a series selects that series, even if the name contains commas."""
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    after_step: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Return only steps after this step; pass `next_step` of the previous response."""
    until_step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Return only steps up to this step. Together with `after_step`, this returns a part of the
    series in more detail."""
    max_points: Annotated[int, Field(ge=2, le=100_000)] = 2000
    """Most points of each series; extremes and the first and last point are kept."""
    in_order: bool = False
    """Return the first `max_points` points of each series without downsampling. Pass `next_step` to
    the next call to continue."""
    times: bool = False
    """Also return the time at which each point was reported."""


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_model=views.Metrics,
    responses=declare("invalid_parameter", "job_not_found"),
)
async def metrics(
    request: Request,
    reading: TheReading,
    _: Caller,
    job_id: str,
    query: Annotated[MetricsQuery, QueryParameters()],
) -> Response:
    """Return series over all attempts; each (key, rank, step) appears once."""
    found = await reading.metrics(
        job_id,
        keys=query.keys if any(text.strip(",") for text in query.keys) else None,
        rank=query.rank,
        after_step=query.after_step,
        until_step=query.until_step,
        max_points=query.max_points,
        in_order=query.in_order,
        times=query.times,
    )
    return answer(request, found)


class SystemMetricsQuery(Query):
    keys: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Series to return, as repeated parameters or separated by commas; by default all series."""
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    after_time: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Return only points after this time, in Unix seconds; pass `next_time` of the previous
    response."""
    max_points: Annotated[int, Field(ge=2, le=100_000)] = 2000
    """Most points of each series; extremes and the first and last point are kept."""


@router.get(
    "/metrics/system",
    operation_id="get_system_metrics",
    response_model=views.SystemMetrics,
    responses=declare("invalid_parameter", "job_not_found"),
)
async def system_metrics(
    request: Request,
    reading: TheReading,
    _: Caller,
    job_id: str,
    query: Annotated[SystemMetricsQuery, QueryParameters()],
) -> Response:
    """Return the resource usage of a rank over time: processors, memory, disks, GPUs. The lowest
    rank on a node also has the usage of the node."""
    found = await reading.system_metrics(
        job_id,
        keys=_divided(query.keys),
        rank=query.rank,
        after_time=query.after_time,
        max_points=query.max_points,
    )
    return answer(request, found)


@router.get(
    "/metrics/system/newest",
    operation_id="get_newest_system_metrics",
    response_model=views.SystemSample,
    responses=declare("job_not_found"),
)
async def newest_system_metrics(
    request: Request, reading: TheReading, _: Caller, job_id: str
) -> Response:
    """Return the newest sample of the resource usage of every rank."""
    return answer(request, await reading.newest_system_metrics(job_id))


def _divided(texts: Sequence[str]) -> list[str] | None:
    """Split strings of comma-separated keys; None if there are no keys."""
    return [key for text in texts for key in text.split(",") if key] or None
