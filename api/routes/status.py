"""GET /v1/jobs/{id}: shows the status of a job. This is the API's most frequent call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from fastapi.routing import APIRoute
from pydantic import Field

from api.context import Caller, Query, TheContext, TheJobs, caller_of, context_of
from api.http.caching import answer, answer_json
from api.http.waiting import MAX_WAIT_S, unless_over
from api.problems import declare
from dray import views
from dray.views import JobState


class StatusRoute(APIRoute):
    """Responds to calls without parameters directly, because FastAPI's parameter resolution is
    slow."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if request.scope["query_string"]:
                return await usual(request)
            await caller_of(request)
            status = context_of(request).runtime.status
            job_id = request.path_params["job_id"]
            return answer_json(request, status.peek(job_id) or await status.read(job_id))

        return handler


router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StatusRoute)


class GetQuery(Query):
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait for the state to change."""
    state: JobState | None = None
    """Wait until the job's state differs from this state. The default is the state at the time of
    the call."""


@router.get(
    "/{job_id}",
    operation_id="get_job",
    response_model=views.Job,
    responses=declare("invalid_parameter", "job_not_found"),
)
async def get(
    request: Request,
    context: TheContext,
    jobs: TheJobs,
    _: Caller,
    job_id: str,
    query: Annotated[GetQuery, QueryParameters()],
) -> Response:
    """Show a job. With `wait_s`, wait until the job's state changes."""
    job = None
    if query.wait_s > 0:
        waiting = jobs.wait(job_id, wait_s=query.wait_s, known_state=query.state)
        job = await unless_over(context, request, waiting)
    return answer(request, job or await jobs.get(job_id))
