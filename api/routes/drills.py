"""/v1/jobs/{id}/drill and /drills: faults that users inject into their own jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, NoParameters, Query, TheContext, TheFaults
from api.http import body
from api.http.caching import answer, fresh
from api.http.idempotency import PROBLEMS, KeyHeader, check_key, named
from api.http.waiting import MAX_WAIT_S, long_poll
from api.openapi import json_body
from api.problems import declare
from dray import views
from dray.requests import DrillRequest

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["drills"])


@router.post(
    "/drill",
    operation_id="drill_job",
    status_code=202,
    response_model=views.Drill,
    openapi_extra=json_body(DrillRequest),
    dependencies=[NoParameters],
    responses=declare(
        "malformed_request",
        "body_too_large",
        "unsupported_media_type",
        "invalid_document",
        "invalid_parameter",
        "job_not_found",
        "job_not_running",
        "drill_impossible",
        *PROBLEMS,
    ),
)
async def drill(
    request: Request,
    context: TheContext,
    faults: TheFaults,
    owner: Caller,
    job_id: str,
    idempotency_key: KeyHeader = None,
) -> Response:
    """Kill or stall a rank of a running job, or preempt the job, to test how the job recovers. The
    drill reports the recovery."""
    key = check_key(idempotency_key)
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, document = await body.read_as(DrillRequest, request, limit_bytes)
    # Include the job's id, so that submissions and drills of other jobs have different
    # fingerprints.
    idempotency = named(key, body.fingerprint({"drill": job_id, "document": document}))
    made = await faults.drill(
        job_id,
        wanted,
        owner=owner,
        actor=context.authority.actor(owner),
        idempotency=idempotency,
    )
    return fresh(made, 202, {"Location": f"/v1/jobs/{job_id}/drills/{made.id}"})


@router.get(
    "/drills",
    operation_id="get_drills",
    response_model=views.DrillPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def drills(request: Request, faults: TheFaults, _: Caller, job_id: str) -> Response:
    """List the drills of a job, oldest first."""
    return answer(request, await faults.drills(job_id))


class DrillQuery(Query):
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait until the drill is over."""


@router.get(
    "/drills/{drill_id}",
    operation_id="get_drill",
    response_model=views.Drill,
    responses=declare("invalid_parameter", "job_not_found", "drill_not_found"),
)
async def one(
    request: Request,
    context: TheContext,
    faults: TheFaults,
    _: Caller,
    job_id: str,
    drill_id: str,
    query: Annotated[DrillQuery, QueryParameters()],
) -> Response:
    """Show a drill. With `wait_s`, wait until the drill is over."""
    found = await long_poll(
        context,
        request,
        job_id,
        query.wait_s,
        lambda: faults.get_drill(job_id, drill_id),
        lambda drill: drill.state.is_over,
    )
    return answer(request, found)
