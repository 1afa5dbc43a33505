"""/v1/jobs/{id}/artifacts: the results, listed and downloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from api.context import Caller, NoParameters, TheContext, TheReading, answer
from api.problems import Refused, declare
from api.ranges import Range, Unsatisfied, parse_range
from dray import views
from service.domain.errors import ArtifactNotFound
from service.storage import BadKey, Storage

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["artifacts"])

PIECE_BYTES = 1 << 20
BINARY = "application/octet-stream"
BYTES = {BINARY: {"schema": {"type": "string", "format": "binary"}}}


@router.get(
    "/artifacts",
    operation_id="get_artifacts",
    response_model=views.ArtifactPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def artifacts(reading: TheReading, _: Caller, job_id: str) -> Response:
    """The files that the job left."""
    return answer(await reading.artifacts(job_id))


@router.get(
    "/artifacts/{artifact_id}",
    operation_id="download_artifact",
    response_class=Response,
    dependencies=[NoParameters],
    responses={
        200: {"description": "The file.", "content": BYTES},
        206: {"description": "The range of it that was asked for.", "content": BYTES},
        **declare(
            "invalid_parameter",
            "job_not_found",
            "artifact_not_found",
            "range_not_satisfiable",
            "storage_unavailable",
        ),
    },
)
async def artifact(
    request: Request,
    context: TheContext,
    reading: TheReading,
    _: Caller,
    job_id: str,
    artifact_id: str,
) -> Response:
    """One file, or a range of it. Its ETag is the SHA-256 of the whole."""
    found, url = await reading.artifact(job_id, artifact_id)
    storage = context.runtime.storage
    key, size = await _locate(storage, found, url)
    etag = f'"{found.sha256}"'
    part = _wanted_range(request, size, etag)
    name = quote(found.path.rpartition("/")[2])
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "Content-Length": str(part.length if part else size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "X-Content-Type-Options": "nosniff",
    }
    if part:
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{size}"
    whole = part or Range(0, size)
    return StreamingResponse(
        _pieces(storage, key, whole), 206 if part else 200, headers, media_type=BINARY
    )


async def _locate(storage: Storage, artifact: views.Artifact, url: str) -> tuple[str, int]:
    """Key and size of the file, which must lie in this storage and be there."""
    try:
        key = storage.key_of(url)
        return key, await asyncio.to_thread(storage.size_bytes, key)
    except (BadKey, FileNotFoundError):
        raise ArtifactNotFound(
            f"the artifact {artifact.path!r} is listed, but its file is not in the storage"
        ) from None


def _wanted_range(request: Request, size: int, etag: str) -> Range | None:
    """None for all of it, also when `If-Range` names another version (RFC 9110, 13.1.5)."""
    if request.headers.get("if-range", etag) != etag:
        return None
    try:
        return parse_range(request.headers.get("range"), size)
    except Unsatisfied:
        raise Refused(
            "range_not_satisfiable",
            f"the file has {size} bytes, and none in that range",
            headers={"Content-Range": f"bytes */{size}"},
        ) from None


async def _pieces(storage: Storage, key: str, part: Range) -> AsyncIterator[bytes]:
    for start in range(part.start, part.end, PIECE_BYTES):
        end = min(start + PIECE_BYTES, part.end)
        yield await asyncio.to_thread(storage.read_bytes, key, start, end)
