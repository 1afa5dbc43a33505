"""/v1/jobs/{id}/samples: the texts that the model generated at its evaluations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, PageQuery, use_cases
from api.http.caching import answer
from api.problems import declare
from dray import views
from service.jobs.text_samples import SampleListing

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["samples"])
TheSamples = Annotated[SampleListing, use_cases(lambda runtime: SampleListing(runtime.database))]


class SamplesQuery(PageQuery):
    step: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Return only the texts of this step."""


@router.get(
    "/samples",
    operation_id="get_samples",
    response_model=views.SampledTextsPage,
    responses=declare("malformed_request", "invalid_parameter", "job_not_found", "bad_cursor"),
)
async def samples(
    request: Request,
    samples: TheSamples,
    _: Caller,
    job_id: str,
    query: Annotated[SamplesQuery, QueryParameters()],
) -> Response:
    """List the texts that the model generated for the prompts of `samples` at its evaluations, in
    the order of the steps. The last 1,000 evaluations are kept."""
    page = await samples.list(job_id, step=query.step, limit=query.limit, cursor=query.cursor)
    return answer(request, page)
