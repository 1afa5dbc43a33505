"""Single-use links to files of jobs, for browsers, which don't send a token with a download.

A link becomes invalid when its download begins. To resume an interrupted download, use another link
and the `Range` of the missing bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from fastapi.responses import StreamingResponse
from pydantic import Field

from api.context import (
    Caller,
    Context,
    NoParameters,
    Query,
    TheContext,
    TheQueries,
    use_cases,
)
from api.http import body
from api.http.caching import fresh
from api.http.downloads import BINARY, DOWNLOAD, attachment, download
from api.openapi import json_body
from api.problems import BODY, declare
from api.routes.reports import artifacts, checkpoints
from dray import views
from dray.requests import DownloadRequest, LogRequest
from service.jobs.downloads import DownloadLinks, no_such_link
from service.jobs.queries import MAX_LINES, Queries

router = APIRouter(prefix="/v1", tags=["downloads"])
TheLinks = Annotated[DownloadLinks, use_cases(lambda runtime: DownloadLinks(runtime.database))]


class LogTextQuery(Query):
    rank: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    attempt: Annotated[int, Field(ge=1, lt=2**31)] | None = None


_WANTED = ("job_not_found", "artifact_not_found", "checkpoint_not_found", "storage_unavailable")


@router.post(
    "/jobs/{job_id}/downloads",
    operation_id="create_download_link",
    status_code=201,
    response_model=views.DownloadLink,
    openapi_extra=json_body(DownloadRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *_WANTED),
)
async def create(
    request: Request, context: TheContext, links: TheLinks, caller: Caller, job_id: str
) -> Response:
    """Create a link for downloading an artifact, a checkpoint file or a log of a job without a
    token. The link works once, within a minute, and only while the token that created it is
    valid."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(DownloadRequest, request, limit_bytes)
    # Check now whether the content exists, because a browser that follows the link would not
    # display the error.
    await _content(request, context, job_id, wanted)
    link = await links.create(
        job_id, wanted, owner=caller, token_id=context.authority.token_id(caller)
    )
    return fresh(link, 201, {"Location": link.url})


@router.get(
    "/downloads/{secret}",
    operation_id="use_download_link",
    response_class=Response,
    dependencies=[NoParameters],
    responses={
        **DOWNLOAD,
        **declare("invalid_parameter", "download_link_not_found", "range_not_satisfiable"),
        **declare(*_WANTED),
    },
)
async def use(request: Request, context: TheContext, links: TheLinks, secret: str) -> Response:
    """Download the file that a link refers to, or a range of it. After the download has started,
    the link is no longer valid."""
    link = await links.use(secret)
    if link.token_id is None or link.token_id != context.authority.token_id(link.owner):
        raise no_such_link()
    request.state.caller = link.owner
    response = await _content(request, context, link.job_id, link.wanted)
    response.headers["Cache-Control"] = "no-store"
    # Without `Accept-Ranges: none`, some browsers, such as Chromium for Android, request several
    # ranges of a large file at the same time. Because the link can be used only once, only the
    # first of these requests would succeed.
    response.headers["Accept-Ranges"] = "none"
    return response


@router.get(
    "/jobs/{job_id}/logs/text",
    operation_id="get_log_text",
    response_class=Response,
    responses={
        200: {**DOWNLOAD[200], "description": "The log."},
        **declare("invalid_parameter", "job_not_found", "storage_unavailable"),
    },
)
async def log_text(
    queries: TheQueries,
    _: Caller,
    job_id: str,
    query: Annotated[LogTextQuery, QueryParameters()],
) -> Response:
    """Download the whole log of a job, or of one rank, as text with one line for each line of
    output. Without `rank`, each line begins with the numbers of its attempt and its rank."""
    log = LogRequest(rank=query.rank, attempt=query.attempt)
    response = await _whole_log(queries, job_id, log)
    response.headers["Cache-Control"] = "no-store"
    return response


async def _content(
    request: Request, context: Context, job_id: str, wanted: DownloadRequest
) -> Response:
    storage, queries = context.runtime.storage, context.runtime.queries
    if wanted.artifact is not None:
        artifact, url = await queries.artifact(job_id, wanted.artifact)
        return download(request, storage, await artifacts.locate(storage, artifact, url))
    if wanted.checkpoint is not None:
        step, path = wanted.checkpoint.step, wanted.checkpoint.path
        return download(request, storage, await checkpoints.locate(queries, job_id, step, path))
    log = wanted.log
    assert log is not None, "exactly one field is set"
    return await _whole_log(queries, job_id, log)


async def _whole_log(queries: Queries, job_id: str, log: LogRequest) -> Response:
    first = await _page(queries, job_id, log, None)
    name = f"{job_id}.log" if log.rank is None else f"{job_id}-rank-{log.rank}.log"
    lines = _lines(queries, job_id, log, first)
    return StreamingResponse(lines, headers=attachment(name), media_type=BINARY)


async def _page(
    queries: Queries, job_id: str, log: LogRequest, cursor: str | None
) -> views.LogPage:
    return await queries.logs(
        job_id, rank=log.rank, attempt=log.attempt, cursor=cursor, limit=MAX_LINES
    )


async def _lines(
    queries: Queries, job_id: str, log: LogRequest, page: views.LogPage
) -> AsyncIterator[bytes]:
    """Yield the lines of this page and of all following pages."""
    while page.items:
        texts = [
            line.text if log.rank is not None else f"[{line.attempt}:{line.rank}] {line.text}"
            for line in page.items
        ]
        yield "".join(f"{text}\n" for text in texts).encode("utf-8", "replace")
        page = await _page(queries, job_id, log, page.next_cursor)
