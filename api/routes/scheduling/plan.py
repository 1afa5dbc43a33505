"""/v1/plan: lists the ways to parallelize a job across its workers."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheContext, TheJobs
from api.http import body
from api.http.caching import fresh
from api.openapi import json_body
from api.problems import declare
from dray import views
from dray.requests import PlanRequest

router = APIRouter(prefix="/v1", tags=["plan"])


@router.post(
    "/plan",
    operation_id="plan_job",
    response_model=views.Plan,
    openapi_extra=json_body(PlanRequest),
    dependencies=[NoParameters],
    responses=declare(
        "malformed_request",
        "body_too_large",
        "unsupported_media_type",
        "invalid_document",
        "not_plannable",
        "invalid_parameter",
    ),
)
async def plan(request: Request, context: TheContext, jobs: TheJobs, _: Caller) -> Response:
    """Compute the memory and the expected step time of each way to parallelize a job, without
    submitting the job.

    The body is a job document. Additional optional fields provide information that the planner
    can't derive from the document.
    """
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(PlanRequest, request, limit_bytes, as_yaml=True)
    return fresh(await jobs.plan(wanted), 200)
