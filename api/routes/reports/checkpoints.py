"""/v1/jobs/{id}/checkpoints: the checkpoints of a job and their files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.context import Caller, NoParameters, TheContext, TheQueries
from api.http.caching import answer
from api.http.downloads import DOWNLOAD, DOWNLOAD_HEAD, StoredFile, download
from api.problems import declare
from dray import views
from service.jobs.queries import Queries

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["checkpoints"])

Step = Annotated[int, Path(ge=0, le=2**63 - 1)]
"""Number of completed optimizer steps. If several attempts saved the same step, this selects the
checkpoint of the latest attempt."""


_PROBLEMS = declare(
    "malformed_request",
    "invalid_parameter",
    "job_not_found",
    "checkpoint_not_found",
    "storage_unavailable",
)


@router.get(
    "/checkpoints",
    operation_id="get_checkpoints",
    response_model=views.CheckpointPage,
    dependencies=[NoParameters],
    responses=declare("malformed_request", "invalid_parameter", "job_not_found"),
)
async def checkpoints(request: Request, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """List the committed checkpoints with their step, size and hash, and mark the best and the
    latest checkpoint."""
    return answer(request, await queries.checkpoints(job_id))


@router.get(
    "/checkpoints/{step}/files",
    operation_id="get_checkpoint_files",
    response_model=views.CheckpointFilePage,
    dependencies=[NoParameters],
    responses=_PROBLEMS,
)
async def files(
    request: Request, queries: TheQueries, _: Caller, job_id: str, step: Step
) -> Response:
    """List the files of a checkpoint, as recorded in its manifest."""
    return answer(request, await queries.checkpoint_files(job_id, step))


@router.head(
    "/checkpoints/{step}/files/{path:path}",
    operation_id="head_checkpoint_file",
    response_class=Response,
    dependencies=[NoParameters],
    responses={**DOWNLOAD_HEAD, **_PROBLEMS},
)
@router.get(
    "/checkpoints/{step}/files/{path:path}",
    operation_id="download_checkpoint_file",
    response_class=Response,
    dependencies=[NoParameters],
    responses={**DOWNLOAD, **_PROBLEMS, **declare("range_not_satisfiable")},
)
async def file(
    request: Request,
    context: TheContext,
    queries: TheQueries,
    _: Caller,
    job_id: str,
    step: Step,
    path: str,
) -> Response:
    """Download a file of a checkpoint, or a range of it. The ETag is the SHA-256 of the complete
    file."""
    return download(request, context.runtime.storage, await locate(queries, job_id, step, path))


async def locate(queries: Queries, job_id: str, step: int, path: str) -> StoredFile:
    """Return the file. Raises CheckpointNotFound if the checkpoint or the file doesn't exist."""
    found, key = await queries.checkpoint_file(job_id, step, path)
    return StoredFile(key, found.size_bytes, found.sha256, found.path)
