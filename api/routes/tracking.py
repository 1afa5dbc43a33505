"""Routes for comparing jobs (/v1/compare), and for the tags and notes of jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Actor, Caller, NoParameters, Query, TheContext, use_cases
from api.http import body
from api.http.caching import answer, fresh, revision_tag, wanted_revision
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.openapi import json_body
from api.problems import BODY, Refused, declare
from dray import views
from dray.requests import AnnotationRequest
from service.tracking.service import Tracking

router = APIRouter(prefix="/v1", tags=["tracking"])
TheTracking = Annotated[Tracking, use_cases(lambda runtime: Tracking(runtime.database))]

MAX_COMPARED = 50


class CompareQuery(Query):
    jobs: Annotated[str, Field(min_length=1, max_length=4096)]
    """Comma-separated ids of up to 50 jobs."""


@router.get(
    "/compare",
    operation_id="compare_jobs",
    response_model=views.Comparison,
    responses=declare("invalid_parameter", "job_not_found", "not_comparable", TOO_MANY),
)
async def compare(
    request: Request,
    tracking: TheTracking,
    _: Caller,
    query: Annotated[CompareQuery, QueryParameters()],
) -> Response:
    """Compare jobs. The response contains the fields in which their documents differ, and their
    metrics, times and costs.

    The pinned baseline of the jobs' experiment is listed first, even if its id was not given.
    """
    job_ids = [job_id.strip() for job_id in query.jobs.split(",")]
    if len(job_ids) > MAX_COMPARED:
        detail = f"{len(job_ids)} jobs are too many to compare: at most {MAX_COMPARED} are allowed"
        raise Refused("invalid_parameter", detail, "/jobs")
    async with limited(request):
        return answer(request, await tracking.compare(job_ids))


@router.get(
    "/jobs/{job_id}/annotations",
    operation_id="get_annotations",
    response_model=views.Annotations,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def get_annotations(
    request: Request, tracking: TheTracking, _: Caller, job_id: str
) -> Response:
    """Show the tags, notes and colour of a job. The ETag of the response is their revision."""
    found = await tracking.annotations(job_id)
    return answer(request, found, revision_tag(found.revision))


@router.patch(
    "/jobs/{job_id}/annotations",
    operation_id="annotate_job",
    response_model=views.Annotations,
    openapi_extra=json_body(AnnotationRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "job_not_found", "annotations_changed", "too_many_tags"),
)
async def annotate(
    request: Request,
    context: TheContext,
    tracking: TheTracking,
    actor: Actor,
    job_id: str,
    if_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Add or remove tags of a job, or replace its notes or its colour. The job can be in any state.

    With `If-Match`, the change is made only if this header matches the current ETag of the
    annotations.
    """
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(AnnotationRequest, request, limit_bytes)
    revision = wanted_revision(if_match)
    found = await tracking.annotate(job_id, wanted, revision=revision, actor=actor)
    return fresh(found, 200, revision_tag(found.revision))
