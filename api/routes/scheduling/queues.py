"""/v1/queues: shows, creates, changes and deletes queues."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters

from api.context import Admin, Caller, NoParameters, Query, TheContext, use_cases
from api.http import body
from api.http.caching import answer, fresh
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.queue_requests import QueueChangeRequest, QueueRequest
from dray.spec.fields import QUEUE_NAME
from service.queues.service import Queues

router = APIRouter(prefix="/v1/queues", tags=["queues"])
TheQueues = Annotated[Queues, use_cases(lambda runtime: Queues(runtime.database, runtime.prices))]

QueueOfPath = Annotated[str, Path(max_length=63, pattern=QUEUE_NAME)]


@router.get(
    "",
    operation_id="list_queues",
    response_model=views.QueuePage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def list_queues(request: Request, queues: TheQueues, _: Caller) -> Response:
    """List the queues by name, with their rules and their numbers of waiting and running jobs."""
    return answer(request, await queues.list())


@router.get(
    "/{name}",
    operation_id="get_queue",
    response_model=views.Queue,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "queue_not_found"),
)
async def get(request: Request, queues: TheQueues, _: Caller, name: QueueOfPath) -> Response:
    """Show a queue: its rules, its numbers of waiting and running jobs, and the resources that are
    allocated to each user's running jobs."""
    return answer(request, await queues.get(name))


@router.put(
    "/{name}",
    operation_id="put_queue",
    response_model=views.Queue,
    openapi_extra=json_body(QueueRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "invalid_queue"),
)
async def put(
    request: Request, context: TheContext, queues: TheQueues, actor: Admin, name: QueueOfPath
) -> Response:
    """Create a queue, or replace all rules of a queue; only for admins. In the response, `warnings`
    lists the rules that the cluster currently can't satisfy."""
    limit_bytes = context.runtime.settings.max_body_bytes
    rules, _document = await body.read_as(QueueRequest, request, limit_bytes)
    return fresh(await queues.put(name, rules, actor=actor), 200)


class ChangeQuery(Query):
    create: bool = False
    """If the queue does not exist, create it with these rules."""


@router.patch(
    "/{name}",
    operation_id="change_queue",
    response_model=views.Queue,
    openapi_extra=json_body(QueueChangeRequest),
    responses=declare(*BODY, "invalid_queue", "queue_not_found"),
)
async def change(
    request: Request,
    context: TheContext,
    queues: TheQueues,
    actor: Admin,
    name: QueueOfPath,
    query: Annotated[ChangeQuery, QueryParameters()],
) -> Response:
    """Change some of a queue's rules. Only admins are allowed to do this. The body is a merge patch
    (RFC 7396), sent as `application/json`: null resets a rule to its default, or removes a resource
    or a user's weight."""
    limit_bytes = context.runtime.settings.max_body_bytes
    changes, _document = await body.read_as(QueueChangeRequest, request, limit_bytes)
    return fresh(await queues.change(name, changes, create=query.create, actor=actor), 200)


@router.delete(
    "/{name}",
    operation_id="delete_queue",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "queue_not_found", "queue_in_use"),
)
async def delete(queues: TheQueues, actor: Admin, name: QueueOfPath) -> Response:
    """Delete a queue that has no unfinished jobs. Only admins can do this. The queue `default`
    can't be deleted."""
    await queues.delete(name, actor=actor)
    return Response(status_code=204)
