"""/v1/sweeps: shows the trials of a document with `sweep`, and the best trial.

The trials of a sweep are an array, so use `/v1/arrays` to cancel or delete a sweep.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, PageQuery, Query, TheContext, TheJobs
from api.http.caching import answer
from api.http.waiting import MAX_WAIT_S, long_poll
from api.problems import declare
from dray import views
from service.db.notifications import events_of

router = APIRouter(prefix="/v1/sweeps", tags=["jobs"])


class SweepQuery(Query):
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait until all trials have ended."""


@router.get(
    "/{sweep_id}",
    operation_id="get_sweep",
    response_model=views.JobSweep,
    responses=declare("invalid_parameter", "sweep_not_found"),
)
async def get(
    request: Request,
    context: TheContext,
    jobs: TheJobs,
    _: Caller,
    sweep_id: str,
    query: Annotated[SweepQuery, QueryParameters()],
) -> Response:
    """Show a sweep with its best trial. With `wait_s`, wait until all trials have ended. The id of
    a sweep is the `array_id` of its jobs."""
    sweep = await long_poll(
        context,
        request,
        events_of(sweep_id),
        query.wait_s,
        lambda: jobs.sweeps.get(sweep_id),
        lambda sweep: sweep.is_settled(),
    )
    return answer(request, sweep)


@router.get(
    "/{sweep_id}/trials",
    operation_id="list_trials",
    response_model=views.TrialPage,
    responses=declare("invalid_parameter", "sweep_not_found", "bad_cursor"),
)
async def trials(
    request: Request,
    jobs: TheJobs,
    _: Caller,
    sweep_id: str,
    query: Annotated[PageQuery, QueryParameters()],
) -> Response:
    """List the trials of a sweep with their values, in the order of their indices. The best trial
    is marked."""
    page = await jobs.sweeps.trials(sweep_id, limit=query.limit, cursor=query.cursor)
    return answer(request, page)
