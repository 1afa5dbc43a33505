"""/api/2.0/mlflow: experiments, runs, metrics and artifacts for MLflow's client, read-only.

Set `MLFLOW_TRACKING_URI` to the server's address, and `MLFLOW_TRACKING_TOKEN` to your token.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from api.context import Caller, TheContext, TheJobs, TheQueries, use_cases
from api.http.body import read_as
from api.http.downloads import download
from api.http.waiting import limited
from api.mlflow import answers
from api.mlflow.answers import MlflowRoute, mlflow_error
from api.routes.reports.artifacts import locate
from dray import views
from service.domain.errors import ArtifactNotFound
from service.tracking.mlflow.queries import MlflowExperiment, MlflowQueries

API, ARTIFACTS = "/api/2.0/mlflow", "/api/2.0/mlflow-artifacts/artifacts"

# MLflow documents this API, so dray's OpenAPI description omits it.
router = APIRouter(route_class=MlflowRoute, include_in_schema=False)
TheMlflow = Annotated[
    MlflowQueries, use_cases(lambda runtime: MlflowQueries(runtime.database, runtime.queries))
]


class ExperimentSearch(BaseModel):
    """The fields of MLflow's request that dray supports; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    filter: str = ""


class RunSearch(ExperimentSearch):
    experiment_ids: list[str] = []
    order_by: Annotated[list[str], Field(max_length=20)] = []
    max_results: int = 1000
    page_token: str | None = None
    run_view_type: str = "ACTIVE_ONLY"


Text = Annotated[str, Query(max_length=1024)]
Token = Annotated[str | None, Query(max_length=64 * 1024)]


@router.get(f"{API}/experiments/search")
async def list_experiments(
    request: Request,
    mlflow: TheMlflow,
    _: Caller,
    filter: Text = "",  # noqa: A002
) -> Response:
    return await _experiments(request, mlflow, filter)


@router.post(f"{API}/experiments/search")
async def search_experiments(
    request: Request, context: TheContext, mlflow: TheMlflow, _: Caller
) -> Response:
    limit = context.runtime.settings.max_body_bytes
    asked, _document = await read_as(ExperimentSearch, request, limit, optional=True)
    return await _experiments(request, mlflow, asked.filter)


async def _experiments(request: Request, mlflow: MlflowQueries, filter_: str) -> Response:
    """Return all experiments on one page."""
    async with limited(request):
        found = await mlflow.experiments(filter_)
    return JSONResponse({"experiments": [answers.experiment(one) for one in found]})


@router.get(f"{API}/experiments/get")
async def get_experiment(
    request: Request, mlflow: TheMlflow, _: Caller, experiment_id: Text
) -> Response:
    async with limited(request):
        found = [one for one in await mlflow.experiments() if one.id == experiment_id]
    return _one(found, f"there is no experiment with the id {experiment_id!r}")


@router.get(f"{API}/experiments/get-by-name")
async def get_experiment_by_name(
    request: Request, mlflow: TheMlflow, _: Caller, experiment_name: Text
) -> Response:
    async with limited(request):
        found = [one for one in await mlflow.experiments() if one.name == experiment_name]
    return _one(found, f"no job has the label experiment={experiment_name}")


def _one(found: list[MlflowExperiment], otherwise: str) -> Response:
    if not found:
        return mlflow_error(404, "RESOURCE_DOES_NOT_EXIST", otherwise)
    return JSONResponse({"experiment": answers.experiment(found[0])})


@router.get(f"{API}/runs/get")
async def get_run(jobs: TheJobs, mlflow: TheMlflow, _: Caller, run_id: Text) -> Response:
    job = await jobs.get(run_id)
    notes, last = await mlflow.notes(run_id), await mlflow.last_metrics(run_id)
    return JSONResponse({"run": answers.run(job, notes, last)})


@router.post(f"{API}/runs/search")
async def search_runs(
    request: Request, context: TheContext, mlflow: TheMlflow, _: Caller
) -> Response:
    limit = context.runtime.settings.max_body_bytes
    asked, _document = await read_as(RunSearch, request, limit)
    if asked.run_view_type == "DELETED_ONLY":  # deleted jobs are not kept
        return JSONResponse({"runs": []})
    async with limited(request):
        page = await mlflow.search(
            asked.experiment_ids, asked.filter, asked.order_by, asked.max_results, asked.page_token
        )
    found = {"runs": [answers.run(job, page.notes.get(job.id)) for job in page.jobs]}
    return JSONResponse(answers.with_token(found, page.next_token))


@router.get(f"{API}/metrics/get-history")
async def get_history(
    mlflow: TheMlflow,
    _: Caller,
    run_id: Text,
    metric_key: Text,
    max_results: int = 25_000,
    page_token: Token = None,
) -> Response:
    page = await mlflow.history(run_id, metric_key, max_results, page_token)
    return JSONResponse(answers.history(metric_key, page))


@router.get(f"{API}/artifacts/list")
async def list_artifacts(queries: TheQueries, _: Caller, run_id: Text, path: Text = "") -> Response:
    found = await queries.artifacts(run_id)
    root = {"root_uri": f"mlflow-artifacts:/{run_id}"}
    return JSONResponse({**root, "files": answers.files(found.items, path.strip("/"))})


@router.get(ARTIFACTS)
async def list_files(queries: TheQueries, _: Caller, path: Text = "") -> Response:
    """List artifacts as in MLflow's artifact protocol, which uses names instead of paths."""
    job_id, _slash, folder = path.strip("/").partition("/")
    found = answers.files((await queries.artifacts(job_id)).items, folder)
    return JSONResponse({"files": [{**f, "path": f["path"].rpartition("/")[2]} for f in found]})


@router.get(f"{ARTIFACTS}/{{job_id}}/{{path:path}}")
async def download_file(
    request: Request, context: TheContext, queries: TheQueries, _: Caller, job_id: str, path: str
) -> Response:
    artifact = await _artifact(queries, job_id, path)
    found, url = await queries.artifact(job_id, artifact.id)
    storage = context.runtime.storage
    return download(request, storage, await locate(storage, found, url))


async def _artifact(queries: TheQueries, job_id: str, path: str) -> views.Artifact:
    for artifact in (await queries.artifacts(job_id)).items:
        if artifact.path == path:
            return artifact
    raise ArtifactNotFound(f"the job {job_id} has no artifact {path!r}")


@router.post(f"{API}/logged-models/search")
async def search_models(_: Caller) -> Response:
    """Return an empty list. MLflow's client requests a separate list of models when it lists
    artifacts, but dray stores models as artifacts."""
    return JSONResponse({"models": []})


_WRITES = ("POST", "PUT", "PATCH", "DELETE")


@router.api_route("/api/{version}/mlflow{path:path}", methods=[*_WRITES, "GET"])
async def anything_else(request: Request, _: Caller) -> Response:
    """Refuse calls that would write, and calls that dray does not support."""
    if request.method in _WRITES and "search" not in request.url.path:
        return mlflow_error(
            403,
            "PERMISSION_DENIED",
            "the MLflow API of a dray server is read-only: use dray.train to report, and dray's "
            "own API to change jobs",
        )
    return mlflow_error(
        404, "ENDPOINT_NOT_FOUND", f"a dray server does not support {request.url.path}"
    )
