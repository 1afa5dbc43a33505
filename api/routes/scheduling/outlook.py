"""/v1/decisions, /v1/forecasts and /v1/jobs/ID/factors: the scheduler's decisions, the accuracy of
forecasts, and the order of the queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, NoParameters, Query, TheQueries
from api.http.caching import answer
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1", tags=["queues"])

MAX_NUMBER = 2**63 - 1
Number = Annotated[int, Path(ge=1, le=MAX_NUMBER)]


class DecisionsQuery(Query):
    before: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    """List only rounds with a number lower than this. Pass the `next_before` of the previous
    page."""
    limit: Annotated[int, Field(ge=1, le=500)] = 100


@router.get(
    "/decisions",
    operation_id="list_decisions",
    response_model=views.DecisionPage,
    responses=declare("invalid_parameter"),
)
async def list_decisions(
    request: Request,
    queries: TheQueries,
    _: Caller,
    query: Annotated[DecisionsQuery, QueryParameters()],
) -> Response:
    """List the scheduler's rounds of the last few hours that changed something, newest first."""
    return answer(request, await queries.decisions(before=query.before, limit=query.limit))


@router.get(
    "/decisions/{number}",
    operation_id="replay_decision",
    response_model=views.ReplayedDecision,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "decision_not_found", TOO_MANY),
)
async def replay(request: Request, queries: TheQueries, _: Caller, number: Number) -> Response:
    """Show the state that the scheduler saw in a round and the decision that it made, and run the
    policy on that state again."""
    async with limited(request):
        return answer(request, await queries.decision(number))


@router.get(
    "/forecasts",
    operation_id="forecast_errors",
    response_model=views.ForecastErrors,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def forecasts(request: Request, queries: TheQueries, _: Caller) -> Response:
    """Show how accurate the forecasts of starts and ends were in the last 7 days."""
    return answer(request, await queries.forecast_errors())


@router.get(
    "/jobs/{job_id}/factors",
    operation_id="job_factors",
    response_model=views.JobFactors,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found", TOO_MANY),
)
async def factors(request: Request, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """Show the factors that decide a waiting job's position in the queue, and why the jobs ahead of
    it come first."""
    async with limited(request):
        return answer(request, await queries.factors(job_id))
