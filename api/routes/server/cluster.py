"""/v1/cluster: shows the nodes, their slots, and the jobs that run on them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import NoParameters, TheQueries, Whose
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
async def cluster(request: Request, queries: TheQueries, user: Whose) -> Response:
    """Show the cluster as the service last saw it. Each node has the reservations that `GET
    /v1/reservations` lists for the caller and that are active or begin within a week."""
    return answer(request, await queries.cluster(user=user))
