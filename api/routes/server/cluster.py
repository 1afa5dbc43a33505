"""/v1/cluster: shows the nodes, their slots, and the jobs that run on them; tests nodes; and
releases nodes that were withheld because of a fault.

The host names in paths can contain slashes, because Ray accepts any name.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.context import (
    Actor,
    Caller,
    NoParameters,
    TheContext,
    TheQueries,
    Whose,
    refuse_unless_admin,
    use_cases,
)
from api.http.caching import answer, fresh
from api.problems import declare
from dray import views
from service.nodes.checks import NodeChecks
from service.nodes.withheld import WithheldNodes

router = APIRouter(prefix="/v1", tags=["cluster"])
TheWithheldNodes = Annotated[
    WithheldNodes, use_cases(lambda runtime: WithheldNodes(runtime.database))
]
TheNodeChecks = Annotated[NodeChecks, use_cases(lambda runtime: NodeChecks(runtime.database))]
Hostname = Annotated[str, Path(max_length=255)]


@router.get(
    "/cluster",
    operation_id="get_cluster",
    response_model=views.Cluster,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def cluster(request: Request, queries: TheQueries, user: Whose) -> Response:
    """Show the cluster as the service last saw it. For each node, the response lists its
    reservations that are active or begin within a week, if `GET /v1/reservations` lists them for
    the caller."""
    return answer(request, await queries.cluster(user=user))


@router.post(
    "/cluster/{hostname:path}/release",
    operation_id="release_node",
    response_model=views.ReleasedNode,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "nothing_withheld", "forbidden"),
)
async def release(
    context: TheContext,
    nodes: TheWithheldNodes,
    caller: Caller,
    actor: Actor,
    hostname: Hostname,
) -> Response:
    """Allow a node to get new work again after its GPUs were repaired or checked. Only admins can
    do this. The node is withheld again if a fault happens again."""
    refuse_unless_admin(context, caller, "release nodes")
    return fresh(await nodes.release(hostname, actor=actor), 200)


@router.post(
    "/cluster/check",
    operation_id="check_nodes",
    status_code=202,
    response_model=views.NodeCheckList,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "forbidden"),
)
async def check_all(
    context: TheContext, checks: TheNodeChecks, caller: Caller, actor: Actor
) -> Response:
    """Test the free GPUs of all nodes. Only admins can do this. The response does not wait for the
    tests; `GET /v1/cluster` shows their results in `check` of each node."""
    refuse_unless_admin(context, caller, "test nodes")
    return fresh(await checks.check_all(actor=actor), 202)


@router.post(
    "/cluster/{hostname:path}/check",
    operation_id="check_node",
    status_code=202,
    response_model=views.NodeCheck,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "node_not_found", "forbidden"),
)
async def check(
    context: TheContext,
    checks: TheNodeChecks,
    caller: Caller,
    actor: Actor,
    hostname: Hostname,
) -> Response:
    """Test the free GPUs of a node, or the processors of a node without GPUs. Only admins can do
    this. The response does not wait for the test; `GET /v1/cluster` shows its result in `check` of
    the node. If a test of the node is already waiting or running, that test is returned."""
    refuse_unless_admin(context, caller, "test nodes")
    return fresh(await checks.check(hostname, actor=actor), 202)
