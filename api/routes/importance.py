"""/v1/importance: which parameters a metric depends on, estimated from the runs of a search."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters

from api.context import Caller, Query, use_cases
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.problems import declare
from dray import views
from dray.filters import ImportanceFilter
from service.tracking.importance.service import Importances

router = APIRouter(prefix="/v1/importance", tags=["tracking"])
TheImportances = Annotated[Importances, use_cases(lambda runtime: Importances(runtime.database))]


class ImportanceQuery(ImportanceFilter, Query):
    pass


@router.get(
    "",
    operation_id="get_importance",
    response_model=views.Importance,
    responses=declare("invalid_parameter", "invalid_search", "unavailable", TOO_MANY),
)
async def get_importance(
    request: Request,
    importances: TheImportances,
    caller: Caller,
    query: Annotated[ImportanceQuery, QueryParameters()],
) -> Response:
    """Estimate the importance of the fields in which the documents of the selected jobs differ, for
    a metric. Only jobs that succeeded and have a finite value count.

    The server processes two such requests per caller at a time. A few more requests wait, and all
    further requests are refused with 429.
    """
    chosen = query.model_copy(update={"owner": caller}) if query.owner == "@me" else query
    async with limited(request):
        return answer(request, await importances.of_search(chosen))
