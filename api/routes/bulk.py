"""POST /v1/jobs/bulk: applies an action to all jobs that a filter selects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheContext, refuse_unless_admin, use_cases
from api.http import body
from api.http.caching import fresh
from api.http.concurrency import TOO_MANY, ConcurrencyLimits
from api.http.waiting import limited
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.bulk_requests import BulkRequest
from service.jobs.bulk import BulkChanges
from service.tracking.service import annotate_row

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
TheBulkChanges = Annotated[
    BulkChanges,
    use_cases(
        lambda runtime: BulkChanges(runtime.database, runtime.jobs, runtime.settings, annotate_row)
    ),
]

LIMITS = ConcurrencyLimits(at_once=2, of_caller=1)


@router.post(
    "/bulk",
    operation_id="change_jobs",
    response_model=views.BulkChange,
    openapi_extra=json_body(BulkRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "invalid_search", "not_confirmed", TOO_MANY),
)
async def change_jobs(
    request: Request, context: TheContext, changes: TheBulkChanges, caller: Caller
) -> Response:
    """Apply an action to all of the caller's jobs that a filter selects.

    Each job is changed just as the call for a single job would change it. If a job can't be
    changed, the action continues, and the response counts the job under the code of the problem.
    With `dry_run`, nothing is changed, and the response shows what would happen. If the filter,
    apart from its states and owner, matches all jobs, the caller must confirm the number of jobs
    with `max`. Repeating a call has no further effect.
    """
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(BulkRequest, request, limit_bytes)
    if wanted.parameters.first:
        refuse_unless_admin(context, caller, "move jobs ahead of other users' jobs")
    if wanted.filter.owner == "@me":
        mine = wanted.filter.model_copy(update={"owner": caller})
        wanted = wanted.model_copy(update={"filter": mine})
    async with limited(request, context.bulk):
        changed = await changes.run(
            wanted,
            caller=caller,
            actor=context.authority.actor(caller),
            is_admin=context.authority.is_admin(caller),
            is_stopping=context.stopping.is_set,
        )
    return fresh(changed, 200)
