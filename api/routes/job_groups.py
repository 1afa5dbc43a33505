"""/v1/job-groups: jobs grouped by sweep, experiment, label or user."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, use_cases
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.problems import declare
from dray import views
from dray.filters import JobGroups
from service.tracking.groups import JobGrouping

router = APIRouter(prefix="/v1/job-groups", tags=["tracking"])
TheGroups = Annotated[JobGrouping, use_cases(lambda runtime: JobGrouping(runtime.database))]


class GroupsQuery(JobGroups, Query):
    limit: Annotated[int, Field(ge=1, le=500)] = 100
    cursor: str | None = None
    """The `next_cursor` of the previous page, which must have been requested with the same
    filters."""


@router.get(
    "",
    operation_id="list_job_groups",
    response_model=views.JobGroupPage,
    responses=declare("invalid_parameter", "invalid_search", "bad_cursor", TOO_MANY),
)
async def list_job_groups(
    request: Request,
    groups: TheGroups,
    caller: Caller,
    query: Annotated[GroupsQuery, QueryParameters()],
) -> Response:
    """List groups of jobs with their best value, mean and standard deviation, in the order of the
    best values. Without `sort`, the groups are in the order of their keys."""
    chosen = query.model_copy(update={"owner": caller}) if query.owner == "@me" else query
    async with limited(request):
        return answer(request, await groups.groups(chosen, limit=query.limit, cursor=query.cursor))
