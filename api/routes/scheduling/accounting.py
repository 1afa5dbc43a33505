"""/v1/accounting: lists the attempts that ran in a period."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, Query, TheContext, refuse_unless_admin, use_cases
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.problems import declare
from api.routes.scheduling.costs import refuse_empty
from dray import views
from dray.filters import AccountingFilter
from service.jobs.accounting import Accounting

router = APIRouter(prefix="/v1/accounting", tags=["costs"])
TheAccounting = Annotated[Accounting, use_cases(lambda runtime: Accounting(runtime.database))]


class AccountingQuery(AccountingFilter, Query):
    limit: Annotated[int, Field(ge=1, le=500)] = 100
    cursor: str | None = None
    """The `next_cursor` of the previous page, which must have been requested with the same
    filters."""


@router.get(
    "",
    operation_id="list_accounting",
    response_model=views.AccountingPage,
    responses=declare("invalid_parameter", "forbidden", "bad_cursor", TOO_MANY),
)
async def list_accounting(
    request: Request,
    context: TheContext,
    accounting: TheAccounting,
    caller: Caller,
    query: Annotated[AccountingQuery, QueryParameters()],
) -> Response:
    """List the attempts that began before the end of a period and had not ended before its start,
    in the order in which their jobs were submitted, with the slots that each attempt held in the
    period.

    Admins see the attempts of all users; other callers see only their own. Attempts of deleted jobs
    are included. The server processes two such requests per caller at a time. A few more requests
    wait, and all further requests are refused with 429.
    """
    refuse_empty(query.since, query.until)
    owner = caller if query.owner == "@me" else query.owner
    if owner not in (None, caller):
        refuse_unless_admin(context, caller, "see the accounting of other users")
    if owner is None and not context.authority.is_admin(caller):
        owner = caller
    chosen = query.model_copy(update={"owner": owner})
    async with limited(request):
        return answer(
            request, await accounting.page(chosen, limit=query.limit, cursor=query.cursor)
        )
