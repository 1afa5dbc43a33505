"""/v1/jobs/{id}/logs: returns the output of the ranks, also after the job has ended."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, TheContext, TheQueries
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import MAX_WAIT_S, limited, long_poll
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["logs"])


class LogsQuery(Query):
    rank: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Return only lines of this rank. By default, the lines of all ranks are merged by time, but
    the lines of one rank are always in their original order."""
    attempt: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    contains: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Return only lines that contain this text, in upper or lower case, without colours and other
    control sequences. Each page is the result of searching the next 20,000 lines, so `items` can be
    empty, and `limit` has no effect. The end of the log is reached when `next_cursor` no longer
    changes."""
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000
    cursor: str | None = None
    """`next_cursor` of the previous page."""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait for new lines."""


@router.get(
    "/logs",
    operation_id="get_logs",
    response_model=views.LogPage,
    responses=declare(
        "invalid_parameter", "bad_cursor", "job_not_found", "storage_unavailable", TOO_MANY
    ),
)
async def logs(
    request: Request,
    context: TheContext,
    queries: TheQueries,
    _: Caller,
    job_id: str,
    query: Annotated[LogsQuery, QueryParameters()],
) -> Response:
    """Read a page of log lines, or search the log with `contains`.

    The server processes two searches per caller at a time. A few more requests wait, and all
    further requests are refused with 429.
    """

    async def look() -> views.LogPage:
        async with limited(request) if query.contains is not None else nullcontext():
            return await queries.logs(
                job_id,
                rank=query.rank,
                attempt=query.attempt,
                cursor=query.cursor,
                limit=query.limit,
                contains=query.contains,
            )

    def enough(page: views.LogPage) -> bool:
        has_searched = query.contains is not None and page.next_cursor != query.cursor
        return bool(page.items) or page.complete or has_searched

    page = await long_poll(context, request, job_id, query.wait_s, look, enough)
    return answer(request, page)
