"""/v1/usage: what users and queues used over time, and GPUs that are held but not used."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, TheCaller, use_cases
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.problems import declare
from dray import views
from dray.filters import Time
from service.jobs.idle_gpus import MAX_IDLE_S, IdleGpuSearch
from service.jobs.usage import UsageReports

router = APIRouter(prefix="/v1/usage", tags=["costs"])
TheUsageReports = Annotated[UsageReports, use_cases(lambda runtime: UsageReports(runtime.database))]
TheIdleGpus = Annotated[IdleGpuSearch, use_cases(lambda runtime: IdleGpuSearch(runtime.database))]


class UsageQuery(Query):
    per: Literal["hour", "day"] = "day"
    """Length of the periods."""
    by: Literal["user", "queue"] | None = None
    """Whether to also report the usage of each user or of each queue."""
    since: Time | None = None
    """Start of the report (RFC 3339), which is moved back to the beginning of its hour or day. The
    default is 7 days before `until`, or 24 hours with `per=hour`."""
    until: Time | None = None
    """End of the report (RFC 3339), which is moved to the end of its hour or day. The default is
    the current time."""
    time_zone: str = "UTC"
    """IANA name of the time zone in which hours and days begin, such as `Europe/Berlin`."""


@router.get(
    "",
    operation_id="report_usage",
    response_model=views.UsageReport,
    responses=declare("invalid_parameter", TOO_MANY),
)
async def report(
    request: Request,
    usage: TheUsageReports,
    caller: TheCaller,
    query: Annotated[UsageQuery, QueryParameters()],
) -> Response:
    """Report the slots, CPUs and GPUs that jobs used in each hour or day, their cost, the jobs that
    started and ended, the capacity of the cluster, and how long jobs waited, by reason.

    The totals, and the usage of queues, are the same for all callers. By user, admins see the users
    with the highest usage; other callers see themselves and the sum of all others. A report covers
    at most 366 days, or 31 days with `per=hour`.
    """
    async with limited(request):
        found = await usage.report(
            caller,
            per=query.per,
            by=query.by,
            since=query.since,
            until=query.until,
            time_zone=query.time_zone,
        )
        return answer(request, found)


class IdleGpuQuery(Query):
    min_idle_s: Annotated[float, Field(ge=60, le=MAX_IDLE_S, allow_inf_nan=False)] = 900.0
    """How long a GPU must have been idle, in seconds."""


@router.get(
    "/idle-gpus",
    operation_id="list_idle_gpus",
    response_model=views.IdleGpuReport,
    responses=declare("invalid_parameter", TOO_MANY),
)
async def idle_gpus(
    request: Request,
    idle: TheIdleGpus,
    _: Caller,
    query: Annotated[IdleGpuQuery, QueryParameters()],
) -> Response:
    """List the running jobs with GPUs on which a kernel ran for less than 5% of the time in each
    sample since `min_idle_s` or longer, and the jobs whose GPUs are not measured."""
    async with limited(request):
        return answer(request, await idle.report(query.min_idle_s))
