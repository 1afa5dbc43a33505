"""/v1/shares: the usage of queues and users, compared to their shares."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, TheContext, TheQueries, refuse_unless_admin
from api.http.caching import answer
from api.problems import declare
from dray import views
from dray.spec.fields import QUEUE_NAME

router = APIRouter(prefix="/v1/shares", tags=["queues"])


class SharesQuery(Query):
    queue: Annotated[str, Field(max_length=63, pattern=QUEUE_NAME)] | None = None
    """Show only this queue."""
    user: str | None = None
    """Show only this user. Only admins can name another user."""


@router.get(
    "",
    operation_id="report_shares",
    response_model=views.ShareReport,
    responses=declare("invalid_parameter", "forbidden", "queue_not_found"),
)
async def report(
    request: Request,
    context: TheContext,
    queries: TheQueries,
    caller: Caller,
    query: Annotated[SharesQuery, QueryParameters()],
) -> Response:
    """Report the usage of each queue and user, compared to their shares.

    Admins see all users; other callers see only themselves.
    """
    user = query.user
    if user is not None and user != caller:
        refuse_unless_admin(context, caller, "see the shares of other users")
    if user is None and not context.authority.is_admin(caller):
        user = caller
    return answer(request, await queries.shares(queue=query.queue, owner=user))
