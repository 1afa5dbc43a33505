"""/v1/jobs/{id}/logs: the output of the ranks, which remains available after the job has ended."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, TheContext, TheQueries
from api.http.caching import answer
from api.http.waiting import MAX_WAIT_S, long_poll
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["logs"])


class LogsQuery(Query):
    rank: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Return only lines of this rank; by default of all ranks, merged by time. Lines of the same
    rank are always in their original order."""
    attempt: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000
    cursor: str | None = None
    """`next_cursor` of the previous page."""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait for lines."""


@router.get(
    "/logs",
    operation_id="get_logs",
    response_model=views.LogPage,
    responses=declare("invalid_parameter", "bad_cursor", "job_not_found", "storage_unavailable"),
)
async def logs(
    request: Request,
    context: TheContext,
    queries: TheQueries,
    _: Caller,
    job_id: str,
    query: Annotated[LogsQuery, QueryParameters()],
) -> Response:
    """Read a page of log lines."""

    async def look() -> views.LogPage:
        return await queries.logs(
            job_id, rank=query.rank, attempt=query.attempt, cursor=query.cursor, limit=query.limit
        )

    page = await long_poll(
        context, request, job_id, query.wait_s, look, lambda page: bool(page.items) or page.complete
    )
    return answer(request, page)
