"""/v1/jobs/{id}/attempts and /v1/jobs/{id}/hangs: the attempts to run a job, and its hangs, with
the position of every rank in its code."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheFaults, TheQueries
from api.http.caching import answer
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/jobs/{job_id}")


@router.get(
    "/attempts",
    operation_id="get_attempts",
    tags=["attempts"],
    response_model=views.AttemptPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def attempts(request: Request, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """List the attempts of a job, with their world size, the step from which they resumed, and the
    reason why they ended."""
    return answer(request, await queries.attempts(job_id))


@router.get(
    "/hangs",
    operation_id="get_hangs",
    tags=["hangs"],
    response_model=views.HangPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def hangs(request: Request, faults: TheFaults, _: Caller, job_id: str) -> Response:
    """List the hangs of a job. Each hang shows the ranks that hung, the step and phase, and the
    stack of every rank."""
    return answer(request, await faults.hangs(job_id))
