"""/v1/arrays: shows, changes, cancels and deletes the jobs of a document with `array`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import (
    Actor,
    Caller,
    NoParameters,
    Query,
    TheContext,
    TheJobs,
    refuse_unless_admin,
    use_cases,
)
from api.http import body
from api.http.caching import answer, fresh
from api.http.waiting import MAX_WAIT_S, limited, long_poll
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.requests import ArrayChangeRequest, PreemptRequest
from dray.views import JobState
from service.db.notifications import events_of
from service.jobs.array_changes import ArrayChanges

router = APIRouter(prefix="/v1/arrays", tags=["jobs"])
TheArrayChanges = Annotated[
    ArrayChanges,
    use_cases(lambda runtime: ArrayChanges(runtime.database, runtime.settings)),
]


class ArrayQuery(Query):
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait until all jobs of the array have ended."""
    state: tuple[JobState, ...] = ()
    """States in which a job counts as ended for `wait_s`, in addition to the states of finished
    jobs."""


@router.get(
    "/{array_id}",
    operation_id="get_array",
    response_model=views.JobArray,
    responses=declare("invalid_parameter", "array_not_found"),
)
async def get(
    request: Request,
    context: TheContext,
    jobs: TheJobs,
    _: Caller,
    array_id: str,
    query: Annotated[ArrayQuery, QueryParameters()],
) -> Response:
    """Show the number of an array's jobs in each state. With `wait_s`, wait until all jobs of the
    array have ended. To list the jobs, use `GET /v1/jobs?array=ID`."""
    array = await long_poll(
        context,
        request,
        events_of(array_id),
        query.wait_s,
        lambda: jobs.arrays.get(array_id),
        lambda array: array.is_settled(query.state),
    )
    return answer(request, array)


@router.patch(
    "/{array_id}",
    operation_id="change_array",
    response_model=views.ArrayChange,
    openapi_extra=json_body(ArrayChangeRequest),
    dependencies=[NoParameters],
    responses=declare(
        *BODY,
        "array_not_found",
        "unknown_queue",
        "queue_holds_no_jobs",
        "queue_full",
        "reservation_unfit",
        "priority_too_high",
        "runtime_too_long",
        "unsatisfiable",
    ),
)
async def change(
    request: Request, context: TheContext, changes: TheArrayChanges, caller: Caller, array_id: str
) -> Response:
    """Hold, release or move the waiting jobs of an array, change the priority of its unfinished
    jobs, or change the number of jobs that run at the same time.

    Jobs to which the change does not apply are skipped, and are counted in the response. If the
    rules of a queue do not allow the change for one of the other jobs, no job is changed. Repeating
    a call has no further effect."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ArrayChangeRequest, request, limit_bytes)
    if wanted.first:
        refuse_unless_admin(context, caller, "move jobs ahead of other users' jobs")
    async with limited(request):
        changed = await changes.change(
            array_id,
            wanted,
            actor=context.authority.actor(caller),
            is_admin=context.authority.is_admin(caller),
        )
    return fresh(changed, 200)


@router.post(
    "/{array_id}/preempt",
    operation_id="preempt_array",
    status_code=202,
    response_model=views.ArrayChange,
    openapi_extra=json_body(PreemptRequest, required=False),
    dependencies=[NoParameters],
    responses=declare(*BODY, "array_not_found"),
)
async def preempt(
    request: Request, context: TheContext, changes: TheArrayChanges, actor: Actor, array_id: str
) -> Response:
    """Make the running jobs of an array save checkpoints and release their slots. The jobs return
    to their positions in the queue. Waiting and ended jobs are skipped."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(PreemptRequest, request, limit_bytes, optional=True)
    async with limited(request):
        asked = await changes.preempt(array_id, wanted.grace_s, held=wanted.held, actor=actor)
    return fresh(asked, 202)


@router.post(
    "/{array_id}/cancel",
    operation_id="cancel_array",
    status_code=202,
    response_model=views.JobArray,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "array_not_found"),
)
async def cancel(jobs: TheJobs, actor: Actor, array_id: str) -> Response:
    """Stop all jobs of an array that have not ended. Repeated calls also return 202."""
    return fresh(await jobs.arrays.cancel(array_id, actor=actor), 202)


@router.delete(
    "/{array_id}",
    operation_id="delete_array",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(
        "invalid_parameter",
        "array_not_found",
        "job_live",
        "checkpoint_in_use",
        "storage_unavailable",
    ),
)
async def delete(jobs: TheJobs, actor: Actor, array_id: str) -> Response:
    """Delete all jobs of an array, with their logs, checkpoints and artifacts. The jobs must have
    ended."""
    await jobs.arrays.delete(array_id, actor=actor)
    return Response(status_code=204)
