"""/v1/arrays: shows, cancels and deletes the jobs of a document with `array` as a group."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Actor, Caller, NoParameters, Query, TheContext, TheJobs
from api.http.caching import answer, fresh
from api.http.waiting import MAX_WAIT_S, long_poll
from api.problems import declare
from dray import views
from dray.views import JobState
from service.db.notifications import events_of

router = APIRouter(prefix="/v1/arrays", tags=["jobs"])


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
