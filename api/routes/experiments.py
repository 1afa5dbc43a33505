"""/v1/experiments: the jobs that have the same value for the label `experiment`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi import Query as QueryParameters

from api.context import (
    Actor,
    Caller,
    NoParameters,
    PageQuery,
    Query,
    TheContext,
    use_cases,
)
from api.http import body
from api.http.caching import answer, answer_json, fresh, revision_tag, wanted_revision
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.experiment_requests import ExperimentRequest
from service.tracking.experiments import Experiments

router = APIRouter(prefix="/v1/experiments", tags=["tracking"])
TheExperiments = Annotated[Experiments, use_cases(lambda runtime: Experiments(runtime.database))]
ExperimentName = Annotated[str, Path(max_length=255)]


@router.get(
    "",
    operation_id="list_experiments",
    response_model=views.ExperimentPage,
    responses=declare("invalid_parameter", "bad_cursor", TOO_MANY),
)
async def list_experiments(
    request: Request,
    experiments: TheExperiments,
    _: Caller,
    query: Annotated[PageQuery, QueryParameters()],
) -> Response:
    """List the experiments by name. An experiment is a value of the label `experiment`."""
    async with limited(request):
        return answer(request, await experiments.list(limit=query.limit, cursor=query.cursor))


class ExperimentQuery(Query):
    brief: bool = False
    """Whether to leave out the ranges of the metrics, which take longest."""


@router.get(
    "/{name:path}",
    operation_id="get_experiment",
    response_model=views.ExperimentSummary,
    responses=declare("invalid_parameter", "experiment_not_found", TOO_MANY),
)
async def get_experiment(
    request: Request,
    experiments: TheExperiments,
    _: Caller,
    name: ExperimentName,
    query: Annotated[ExperimentQuery, QueryParameters()],
) -> Response:
    """Show an experiment: what users have stored about it, the states of its jobs, and the minimum
    and maximum of each metric's newest values. The ETag of the response contains the revision."""
    async with limited(request):
        found = await experiments.get(name, brief=query.brief)
        content = found.model_dump_json().encode()
        return answer_json(request, content, revision_tag(found.revision, content))


@router.patch(
    "/{name:path}",
    operation_id="change_experiment",
    response_model=views.ExperimentSummary,
    openapi_extra=json_body(ExperimentRequest),
    dependencies=[NoParameters],
    responses=declare(
        *BODY,
        *("experiment_not_found", "experiment_changed"),
        *("job_not_found", "not_comparable", TOO_MANY),
    ),
)
async def change_experiment(
    request: Request,
    context: TheContext,
    experiments: TheExperiments,
    actor: Actor,
    name: ExperimentName,
    if_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Change the notes, the baseline, the pinned jobs or the layout of an experiment.

    With `If-Match`, the change is made only if this header matches the current revision: it is the
    ETag of a response, or the `revision` in double quotes.
    """
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ExperimentRequest, request, limit_bytes)
    revision = wanted_revision(if_match)
    async with limited(request):
        found = await experiments.change(name, wanted, revision=revision, actor=actor)
        return fresh(found, 200, revision_tag(found.revision, found.model_dump_json().encode()))
