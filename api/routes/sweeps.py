"""/v1/sweeps: shows the trials of a document with `sweep`, the best trial, and the importance of
the parameters.

The trials of a sweep are an array, so use `/v1/arrays` to cancel or delete a sweep.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, PageQuery, Query, TheContext, TheJobs
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import MAX_WAIT_S, limited, long_poll
from api.problems import declare
from api.routes.importance import TheImportances
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


class SweepImportanceQuery(Query):
    metric: Annotated[str | None, Field(max_length=1024)] = None
    """The metric, such as `val/loss` for the last value or `best:val/loss` for the best value. The
    default is the metric of the sweep, and the value by which its trials are compared."""
    include_stopped: bool = False
    """Whether trials that were stopped early count, with the value that they had reached."""


@router.get(
    "/{sweep_id}/importance",
    operation_id="get_sweep_importance",
    response_model=views.Importance,
    responses=declare(
        "invalid_parameter", "invalid_search", "sweep_not_found", "unavailable", TOO_MANY
    ),
)
async def importance(
    request: Request,
    importances: TheImportances,
    _: Caller,
    sweep_id: str,
    query: Annotated[SweepImportanceQuery, QueryParameters()],
) -> Response:
    """Estimate the importance of the parameters of a sweep for a metric. Only trials that succeeded
    and have a finite value count; `left_out` has the number of the others.

    The server processes two such requests per caller at a time. A few more requests wait, and all
    further requests are refused with 429.
    """
    async with limited(request):
        found = await importances.of_sweep(
            sweep_id, metric=query.metric, include_stopped=query.include_stopped
        )
    return answer(request, found)
