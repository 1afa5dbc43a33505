"""/v1/code: uploads the code of jobs, and returns its files."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tarfile
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from api.context import Caller, NoParameters, TheQueries, use_cases
from api.http import body
from api.http.caching import answer, fresh
from api.http.downloads import BINARY, DOWNLOAD
from api.openapi import json_body
from api.problems import Refused, declare
from dray import views
from dray.code.manifest import PART_BYTES, FileEntry
from dray.requests import CodeRequest
from service.code.uploads import CodeUploads, StoredFile

router = APIRouter(prefix="/v1", tags=["code"])
TheCode = Annotated[CodeUploads, use_cases(lambda runtime: runtime.jobs.code)]

DESCRIPTION_BYTES = 16 << 20
"""Maximum size of the description of an upload, which is enough for about 20,000 files."""
PARTS_BYTES = 16 << 20
"""Maximum size of a request body that contains parts."""
TAR = "application/x-tar"

_UPLOAD = declare(
    "malformed_request",
    "body_too_large",
    "unsupported_media_type",
    "invalid_parameter",
    "bad_upload",
    "upload_too_large",
    "quota_exceeded",
    "storage_unavailable",
)


@router.post(
    "/code",
    operation_id="describe_code",
    response_model=views.Code,
    openapi_extra=json_body(CodeRequest),
    dependencies=[NoParameters],
    responses={**_UPLOAD, **declare("invalid_document")},
)
async def describe(request: Request, code: TheCode, owner: Caller) -> Response:
    """Describe the files of the code. The response lists the parts that are missing on the server.

    Upload the missing parts, and then send the same description again. When no part is missing, the
    code can be used in a submission. Resume an interrupted upload in the same way.
    """
    wanted, _document = await body.read_as(CodeRequest, request, DESCRIPTION_BYTES)
    files = [
        FileEntry(file.path, file.size_bytes, file.is_executable, tuple(file.parts))
        for file in wanted.files
    ]
    return fresh(await code.describe(files, owner), 200)


@router.post(
    "/code/parts",
    operation_id="upload_code_parts",
    status_code=204,
    response_class=Response,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}, "example": "(bytes)"}
                for kind in (BINARY, TAR)
            },
        }
    },
    dependencies=[NoParameters],
    responses=_UPLOAD,
)
async def upload_parts(request: Request, code: TheCode, owner: Caller) -> Response:
    """Upload one part as `application/octet-stream`, or several parts as `application/x-tar`, in
    which each file is a part and has the part's SHA-256 as its name. A part can be up to 4 MiB, and
    a request up to 16 MiB."""
    content, kind = await body.read_bytes(request, PARTS_BYTES, (BINARY, TAR))
    if kind == TAR:
        parts = await asyncio.to_thread(_members, content)
    else:
        parts = {(await asyncio.to_thread(hashlib.sha256, content)).hexdigest(): content}
    await code.put_parts(parts, owner)
    return Response(status_code=204)


def _members(content: bytes) -> dict[str, bytes]:
    """Return the files of a tar archive, keyed by their names, which are hashes."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                if not re.fullmatch("[0-9a-f]{64}", member.name):
                    problem = "is not a SHA-256 digest, but the name of a part must be its digest"
                # Sparse files are refused, because a few bytes in the archive can expand to a file
                # of any size.
                elif not member.isreg() or member.issparse():
                    problem = "is not a regular file"
                elif not 0 <= member.size <= PART_BYTES:
                    problem = f"has {member.size} bytes; the maximum size of a part is {PART_BYTES}"
                else:
                    packed = archive.extractfile(member)
                    assert packed is not None, "a regular file has content"
                    found[member.name] = packed.read()
                    continue
                raise Refused("bad_upload", f"{member.name[:100]!r} {problem}")
    except (
        tarfile.TarError,
        ValueError,
        OSError,
        EOFError,
        OverflowError,
        RecursionError,
    ) as error:
        raise Refused("bad_upload", f"the body is not a complete tar archive: {error}") from None
    return found


@router.get(
    "/jobs/{job_id}/code",
    operation_id="get_job_code",
    response_model=views.CodeFilePage,
    dependencies=[NoParameters],
    responses=declare(
        "malformed_request",
        "invalid_parameter",
        "job_not_found",
        "code_not_found",
        "storage_unavailable",
    ),
)
async def job_code(
    request: Request, code: TheCode, queries: TheQueries, _: Caller, job_id: str
) -> Response:
    """List the files of a job's code, as they were uploaded."""
    owner, identity = await queries.code_of(job_id)
    files = await code.files(owner, identity)
    items = [
        views.CodeFile(path=file.path, size_bytes=file.size_bytes, is_executable=file.is_executable)
        for file in files
    ]
    return answer(request, views.CodeFilePage(id=identity, items=items))


@router.get(
    "/jobs/{job_id}/code/archive",
    operation_id="download_job_code",
    response_class=Response,
    dependencies=[NoParameters],
    responses={
        200: {"description": "A tar archive.", "content": DOWNLOAD[200]["content"]},
        **declare(
            "malformed_request",
            "invalid_parameter",
            "job_not_found",
            "code_not_found",
            "storage_unavailable",
        ),
    },
)
async def job_code_archive(code: TheCode, queries: TheQueries, _: Caller, job_id: str) -> Response:
    """Download a job's code as a tar archive."""
    owner, identity = await queries.code_of(job_id)
    files = await code.files(owner, identity)
    headers = {
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f'attachment; filename="{identity}.tar"',
    }
    return StreamingResponse(_archive(code, files), 200, headers, media_type=BINARY)


async def _archive(code: CodeUploads, files: Sequence[StoredFile]) -> AsyncIterator[bytes]:
    for file in files:
        member = tarfile.TarInfo(file.path)
        member.size = file.size_bytes
        member.mode = 0o755 if file.is_executable else 0o644
        yield member.tobuf(tarfile.PAX_FORMAT)
        async for piece in code.pieces(file):
            yield piece
        yield bytes(-file.size_bytes % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
