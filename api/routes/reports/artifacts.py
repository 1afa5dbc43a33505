"""/v1/jobs/{id}/artifacts: lists and downloads the results of a job."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheContext, TheQueries
from api.http.caching import answer
from api.http.downloads import DOWNLOAD, DOWNLOAD_HEAD, StoredFile, download
from api.problems import declare
from dray import views
from service.domain.errors import ArtifactNotFound
from service.storage.storage import BadKey, Storage, in_storage_thread

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["artifacts"])

_PROBLEMS = declare(
    "malformed_request",
    "invalid_parameter",
    "job_not_found",
    "artifact_not_found",
    "storage_unavailable",
)


@router.get(
    "/artifacts",
    operation_id="get_artifacts",
    response_model=views.ArtifactPage,
    dependencies=[NoParameters],
    responses=declare("malformed_request", "invalid_parameter", "job_not_found"),
)
async def artifacts(request: Request, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """List the files that a job has stored as results."""
    return answer(request, await queries.artifacts(job_id))


@router.head(
    "/artifacts/{artifact_id}",
    operation_id="head_artifact",
    response_class=Response,
    dependencies=[NoParameters],
    responses={**DOWNLOAD_HEAD, **_PROBLEMS},
)
@router.get(
    "/artifacts/{artifact_id}",
    operation_id="download_artifact",
    response_class=Response,
    dependencies=[NoParameters],
    responses={**DOWNLOAD, **_PROBLEMS, **declare("range_not_satisfiable")},
)
async def artifact(
    request: Request,
    context: TheContext,
    queries: TheQueries,
    _: Caller,
    job_id: str,
    artifact_id: str,
) -> Response:
    """Download a file, or a range of it. The ETag is the SHA-256 of the complete file."""
    found, url = await queries.artifact(job_id, artifact_id)
    storage = context.runtime.storage
    return download(request, storage, await locate(storage, found, url))


async def locate(storage: Storage, artifact: views.Artifact, url: str) -> StoredFile:
    """Return the artifact's file. Raises ArtifactNotFound if the storage doesn't have the complete
    file."""
    try:
        key = storage.key_of(url)
        size = await in_storage_thread(storage.size_bytes, key)
    except (BadKey, FileNotFoundError):
        raise ArtifactNotFound(
            f"the artifact {artifact.path!r} is listed, but its file is not in the storage"
        ) from None
    if size != artifact.size_bytes:  # browsers don't verify hashes
        raise ArtifactNotFound(
            f"the artifact {artifact.path!r} was stored with {artifact.size_bytes} bytes, but its "
            f"file in the storage has {size}"
        )
    return StoredFile(key, size, artifact.sha256, artifact.path)
