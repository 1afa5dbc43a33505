"""/v1/jobs/{id}/metrics: the series, thinned out on the server."""

from __future__ import annotations

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
    """Series to answer, repeated or separated by commas; by default all."""
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    after_step: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Only steps after this one; pass `next_step` of the previous answer."""
    max_points: Annotated[int, Field(ge=2, le=100_000)] = 2000
    """Most points of each series; extremes and the first and last point are kept."""
    in_order: bool = False
    """Answer the first `max_points` points of each series and leave out none: with `next_step` the
    next call goes on there."""
    times: bool = False
    """Answer also when each point was reported."""


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
    """Read series over all attempts; each (key, rank, step) appears once."""
    keys = [key for text in query.keys for key in text.split(",") if key]
    found = await reading.metrics(
        job_id,
        keys=keys or None,
        rank=query.rank,
        after_step=query.after_step,
        max_points=query.max_points,
        in_order=query.in_order,
        times=query.times,
    )
    return answer(request, found)
