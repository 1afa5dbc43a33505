"""/v1/jobs: submit, list, change, cancel, preempt, delete, explain."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import (
    Actor,
    Caller,
    NoParameters,
    Query,
    TheContext,
    TheFaults,
    TheJobs,
    TheQueries,
    refuse_unless_admin,
    use_cases,
)
from api.http import body
from api.http.caching import answer, fresh
from api.http.concurrency import TOO_MANY
from api.http.idempotency import PROBLEMS as IDEMPOTENCY_PROBLEMS
from api.http.idempotency import KeyHeader, check_key, named
from api.http.waiting import limited
from api.openapi import JOB_SPEC_BODY, json_body
from api.problems import BODY, SUBMISSION, declare
from dray import views
from dray.filters import JobTable
from dray.requests import JobChangeRequest, PreemptRequest
from service.jobs.changes import JobChanges

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
TheChanges = Annotated[
    JobChanges, use_cases(lambda runtime: JobChanges(runtime.database, runtime.settings))
]

DEFAULT_PROJECT = "default"


class ListQuery(JobTable, Query):
    brief: bool = False
    """Leave each job's `spec` empty, which makes the response much smaller."""
    limit: Annotated[int, Field(ge=1, le=500)] = 100
    cursor: str | None = None
    """The `next_cursor` of the previous page, which must have been requested with the same
    filters."""


OF_A_DRY_RUN: dict[int | str, dict[str, Any]] = {
    200: {"model": views.Explanation, "description": "The explanation of a dry run."}
}


class SubmitQuery(Query):
    dry_run: bool = False
    """Only report whether and when the job would start, without storing anything."""


@router.post(
    "",
    operation_id="submit_job",
    status_code=201,
    response_model=views.Job,
    openapi_extra=JOB_SPEC_BODY,
    responses=OF_A_DRY_RUN
    | declare(
        *BODY,
        *SUBMISSION,
        *IDEMPOTENCY_PROBLEMS,
        "dependency_not_found",
        "dependency_never_satisfied",
        "job_not_found",
        TOO_MANY,
    ),
)
async def submit(
    request: Request,
    context: TheContext,
    jobs: TheJobs,
    owner: Caller,
    query: Annotated[SubmitQuery, QueryParameters()],
    idempotency_key: KeyHeader = None,
) -> Response:
    """Queue a job or, with `array` or `sweep`, many jobs. Returns the job or, for an array or a
    sweep, the job with index 0.

    If a document is sent again with the same `Idempotency-Key` (1 to 255 printable ASCII
    characters), the job of the first request is returned.

    With `dry_run=true`, the document is checked but nothing is stored: the response is 200 with the
    explanation of the job, including its expected start. The server processes two dry runs per
    caller at a time. A few more requests wait, and all further requests are refused with 429.
    """
    key = check_key(idempotency_key)
    spec, fingerprint = await body.read_spec(request, context.runtime.settings.max_body_bytes)
    if query.dry_run:
        async with limited(request):
            return fresh(await jobs.dry_run(spec, owner=owner, project=DEFAULT_PROJECT), 200)
    job, _created = await jobs.submit(
        spec,
        owner=owner,
        project=DEFAULT_PROJECT,
        actor=context.authority.actor(owner),
        idempotency=named(key, fingerprint),
    )
    return fresh(job, 201, {"Location": f"/v1/jobs/{job.id}"})


@router.get(
    "",
    operation_id="list_jobs",
    response_model=views.JobPage,
    responses=declare("invalid_parameter", "invalid_search", "bad_cursor", TOO_MANY),
)
async def list_jobs(
    request: Request, jobs: TheJobs, caller: Caller, query: Annotated[ListQuery, QueryParameters()]
) -> Response:
    """List jobs, newest first or in the order of `sort`.

    If the value by which a job is sorted changes between two pages, the job can be missing or be
    listed twice.

    The server processes two lists with `where` or `sort` per caller at a time. A few more requests
    wait, and all further requests are refused with 429.
    """
    chosen = query.model_copy(update={"owner": caller}) if query.owner == "@me" else query
    async with limited(request) if query.where or query.sort else nullcontext():
        page = await jobs.list(chosen, limit=query.limit, cursor=query.cursor)
    if query.brief:
        page.items = [job.model_copy(update={"spec": {}}) for job in page.items]
    return answer(request, page)


@router.patch(
    "/{job_id}",
    operation_id="change_job",
    response_model=views.Job,
    openapi_extra=json_body(JobChangeRequest),
    dependencies=[NoParameters],
    responses=declare(
        "malformed_request",
        "body_too_large",
        "unsupported_media_type",
        "invalid_document",
        "invalid_parameter",
        "job_not_found",
        "job_finished",
        "job_not_waiting",
        "unknown_queue",
        "queue_holds_no_jobs",
        "queue_full",
        "reservation_unfit",
        "priority_too_high",
        "runtime_too_long",
        "unsatisfiable",
        "out_of_memory",
        "dependency_not_found",
        "dependency_never_satisfied",
        "forbidden",
    ),
)
async def change(
    request: Request, context: TheContext, changes: TheChanges, caller: Caller, job_id: str
) -> Response:
    """Hold or release a waiting job, move it to another queue or to the front of its queue, change
    its document, or change a job's priority. Repeating a call has no further effect."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(JobChangeRequest, request, limit_bytes)
    if wanted.first:
        refuse_unless_admin(context, caller, "move a job ahead of other users' jobs")
    job = await changes.change(
        job_id,
        wanted,
        actor=context.authority.actor(caller),
        is_admin=context.authority.is_admin(caller),
    )
    return fresh(job, 200)


@router.delete(
    "/{job_id}",
    operation_id="delete_job",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(
        "invalid_parameter", "job_not_found", "job_live", "checkpoint_in_use", "storage_unavailable"
    ),
)
async def delete(jobs: TheJobs, actor: Actor, job_id: str) -> Response:
    """Delete a finished job with its logs, checkpoints and artifacts."""
    await jobs.delete(job_id, actor=actor)
    return Response(status_code=204)


@router.post(
    "/{job_id}/cancel",
    operation_id="cancel_job",
    status_code=202,
    response_model=views.Job,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found", "job_finished"),
)
async def cancel(jobs: TheJobs, actor: Actor, job_id: str) -> Response:
    """Stop a job in any state. Repeated calls also return 202, both while the job is being
    cancelled and afterwards."""
    return fresh(await jobs.cancel(job_id, actor=actor), 202)


@router.post(
    "/{job_id}/preempt",
    operation_id="preempt_job",
    status_code=202,
    response_model=views.Job,
    openapi_extra=json_body(PreemptRequest, required=False),
    dependencies=[NoParameters],
    responses=declare(
        "malformed_request",
        "body_too_large",
        "unsupported_media_type",
        "invalid_document",
        "invalid_parameter",
        "job_not_found",
        "job_not_running",
    ),
)
async def preempt(
    request: Request, context: TheContext, faults: TheFaults, actor: Actor, job_id: str
) -> Response:
    """Make a job save a checkpoint and release its slots. The job returns to its position in the
    queue, and resumes from the checkpoint when it starts again. A preemption doesn't count as a
    retry. Repeated calls also return 202 until the job has released its slots."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(PreemptRequest, request, limit_bytes, optional=True)
    job = await faults.preempt(job_id, wanted.grace_s, held=wanted.held, actor=actor)
    return fresh(job, 202)


@router.get(
    "/{job_id}/explain",
    operation_id="explain_job",
    response_model=views.Explanation,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found", TOO_MANY),
)
async def explain(request: Request, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """Explain why a job is in its current state, and what it is waiting for."""
    async with limited(request):
        return answer(request, await queries.explain(job_id))
