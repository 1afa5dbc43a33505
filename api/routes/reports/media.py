"""/v1/jobs/{id}/media: values that a job reported in addition to numbers, and their files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Caller, NoParameters, PageQuery, TheContext, use_cases
from api.http.caching import answer
from api.http.downloads import DOWNLOAD, StoredFile, download
from api.problems import Refused, declare
from dray import views
from dray.media.kinds import MediaKind
from service.domain.errors import ArtifactNotFound
from service.jobs.media import MediaListing, MediaSelection
from service.storage.storage import in_storage_thread

router = APIRouter(prefix="/v1/jobs/{job_id}/media", tags=["media"])
TheMedia = Annotated[MediaListing, use_cases(lambda runtime: MediaListing(runtime.database))]

EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "audio/wav": "wav",
}
"""File name extensions by media type."""
SANDBOX = "sandbox; default-src 'none'"
"""Content-Security-Policy of a file: a browser that opens it runs no script in it."""


class MediaQuery(PageQuery):
    kind: MediaKind | None = None
    key: Annotated[str, Field(max_length=128)] | None = None
    rank: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    step: Annotated[int, Field(ge=0, le=2**53)] | None = None
    max_records: Annotated[int, Field(ge=2, le=500)] | None = None
    """Return at most this number of records at equal distances, with the first and the last,
    instead of a page. Requires `kind` and `key`; the rank is 0 by default."""


@router.get(
    "",
    operation_id="get_media",
    response_model=views.MediaOverview,
    dependencies=[NoParameters],
    responses=declare("malformed_request", "invalid_parameter", "job_not_found"),
)
async def overview(request: Request, media: TheMedia, _: Caller, job_id: str) -> Response:
    """List the series of the job's media: histograms, pictures, audio, texts, tables, confusion
    matrices and curves."""
    return answer(request, await media.overview(job_id))


@router.get(
    "/records",
    operation_id="get_media_records",
    response_model=views.MediaPage,
    responses=declare("malformed_request", "invalid_parameter", "job_not_found", "bad_cursor"),
)
async def records(
    request: Request,
    media: TheMedia,
    _: Caller,
    job_id: str,
    query: Annotated[MediaQuery, QueryParameters()],
) -> Response:
    """List the media of a job in the order of the ranks, kinds, keys and steps. Values of a step
    that a later attempt repeated are replaced."""
    if query.max_records is None:
        wanted = MediaSelection(query.kind, query.key, query.rank, query.step)
        page = await media.page(job_id, wanted, limit=query.limit, cursor=query.cursor)
        return answer(request, page)
    if query.kind is None or query.key is None or query.cursor is not None:
        detail = "max_records requires kind and key, and can't be combined with cursor"
        raise Refused("invalid_parameter", detail)
    if query.step is not None:
        raise Refused("invalid_parameter", "max_records can't be combined with step")
    rank = query.rank or 0
    page = await media.spread(job_id, query.kind, query.key, rank, query.max_records)
    return answer(request, page)


@router.get(
    "/files/{sha256}",
    operation_id="download_media_file",
    response_class=Response,
    dependencies=[NoParameters],
    responses={
        **DOWNLOAD,
        **declare("malformed_request", "invalid_parameter", "job_not_found"),
        **declare("artifact_not_found", "range_not_satisfiable", "storage_unavailable"),
    },
)
async def file(
    request: Request, context: TheContext, media: TheMedia, _: Caller, job_id: str, sha256: str
) -> Response:
    """Download a picture or audio, or a range of it. The ETag is the SHA-256 of the file."""
    storage = context.runtime.storage
    stored = await media.file(job_id, sha256)
    found = stored.file
    try:
        size = await in_storage_thread(storage.size_bytes, stored.key)
    except FileNotFoundError:
        size = None
    if size != found.size_bytes:
        raise ArtifactNotFound(
            f"the media file {found.sha256} is listed, but is not complete in the storage"
        )
    name = f"{found.sha256[:16]}.{EXTENSIONS[found.media_type]}"
    file = StoredFile(stored.key, found.size_bytes, found.sha256, name, found.media_type)
    response = download(request, storage, file)
    response.headers["Content-Security-Policy"] = SANDBOX
    return response
