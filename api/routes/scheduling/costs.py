"""/v1/costs: the costs of users and queues."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters

from api.context import Caller, Query, TheContext, use_cases
from api.http.caching import answer
from api.problems import Refused, declare
from dray import views
from dray.filters import Time
from service.costs.reports import Costs

router = APIRouter(prefix="/v1/costs", tags=["costs"])
TheCosts = Annotated[Costs, use_cases(lambda runtime: Costs(runtime.database, runtime.prices))]


class CostQuery(Query):
    by: Literal["user", "queue"] = "user"
    """Whether to sum costs by user or by queue."""
    since: Time | None = None
    """Start of the time span (RFC 3339). The default is the beginning of the current month in
    UTC."""
    until: Time | None = None
    """End of the time span (RFC 3339). The default is the current time."""


@router.get(
    "",
    operation_id="report_costs",
    response_model=views.CostReport,
    responses=declare("invalid_parameter"),
)
async def report(
    request: Request,
    context: TheContext,
    costs: TheCosts,
    caller: Caller,
    query: Annotated[CostQuery, QueryParameters()],
) -> Response:
    """Report the cost of each user or queue in a time span, with the highest cost first.

    Admins see the costs of all users; other callers see only their own costs. If only a part of an
    attempt lies within the time span, only that part is charged.
    """
    refuse_empty(query.since, query.until)
    owner = None if context.authority.is_admin(caller) else caller
    found = await costs.report(query.by, since=query.since, until=query.until, owner=owner)
    return answer(request, found)


def refuse_empty(since: datetime | None, until: datetime | None) -> None:
    """Raise Refused if the time span between the two times is empty."""
    if since is not None and until is not None and until <= since:
        hint = "use an earlier `since` or a later `until`"
        raise Refused("invalid_parameter", "`until` must be later than `since`", "/until", hint)
