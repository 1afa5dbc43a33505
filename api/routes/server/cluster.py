"""/v1/cluster: shows the nodes, their slots and jobs, and releases quarantined slots."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.context import Admin, NoParameters, TheQueries, Whose, use_cases
from api.http.caching import answer
from api.problems import declare
from dray import views
from service.nodes.release import FaultyNodes

TheFaultyNodes = Annotated[FaultyNodes, use_cases(lambda runtime: FaultyNodes(runtime.database))]
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


@router.delete(
    "/cluster/nodes/{node}/quarantine",
    operation_id="release_node",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "quarantine_not_found"),
)
async def release_node(
    nodes: TheFaultyNodes, _: Admin, node: Annotated[str, Path(max_length=255)]
) -> Response:
    """Release the slots of a node that were quarantined because the node was found faulty. The node
    is given by its id or its host name. Only admins can do this."""
    await nodes.release(node)
    return Response(status_code=204)
