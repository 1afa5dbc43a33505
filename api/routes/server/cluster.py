"""/v1/cluster: nodes, slots, and where jobs run."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheQueries
from api.http.caching import answer
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1", tags=["cluster"])


@router.get(
    "/cluster",
    operation_id="get_cluster",
    response_model=views.Cluster,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def cluster(request: Request, queries: TheQueries, _: Caller) -> Response:
    """Show the cluster as the service last saw it."""
    return answer(request, await queries.cluster())
