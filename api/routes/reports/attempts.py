"""/v1/jobs/{id}/attempts: the launches of a job."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheQueries
from api.http.caching import answer
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["attempts"])


@router.get(
    "/attempts",
    operation_id="get_attempts",
    response_model=views.AttemptPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def attempts(request: Request, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """List the attempts of a job, with their world size, the step from which they resumed, and the
    reason why they ended."""
    return answer(request, await queries.attempts(job_id))
