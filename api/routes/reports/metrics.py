"""/v1/jobs/{id}/metrics: returns downsampled series, and the resource usage of the ranks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters

from api.context import Caller, Query, TheQueries
from api.http.caching import answer
from api.problems import declare
from dray import views
from service.telemetry.series_filters import MetricsFilter, SystemMetricsFilter

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["metrics"])


class MetricsQuery(MetricsFilter, Query): ...


class SystemMetricsQuery(SystemMetricsFilter, Query): ...


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_model=views.Metrics,
    responses=declare("invalid_parameter", "job_not_found"),
)
async def metrics(
    request: Request,
    queries: TheQueries,
    _: Caller,
    job_id: str,
    query: Annotated[MetricsQuery, QueryParameters()],
) -> Response:
    """Return series over all attempts; each (key, rank, step) appears once."""
    return answer(request, await queries.metrics(job_id, query))


@router.get(
    "/metrics/system",
    operation_id="get_system_metrics",
    response_model=views.SystemMetrics,
    responses=declare("invalid_parameter", "job_not_found"),
)
async def system_metrics(
    request: Request,
    queries: TheQueries,
    _: Caller,
    job_id: str,
    query: Annotated[SystemMetricsQuery, QueryParameters()],
) -> Response:
    """Return the resource usage of a rank over time: processors, memory, disks, GPUs. The samples
    of the lowest rank on each node also contain the usage of the node."""
    return answer(request, await queries.system_metrics(job_id, query))


@router.get(
    "/metrics/system/newest",
    operation_id="get_newest_system_metrics",
    response_model=views.SystemSample,
    responses=declare("job_not_found"),
)
async def newest_system_metrics(
    request: Request, queries: TheQueries, _: Caller, job_id: str
) -> Response:
    """Return the newest sample of the resource usage of every rank."""
    return answer(request, await queries.newest_system_metrics(job_id))
