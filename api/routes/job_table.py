"""/v1/job-table: a list of jobs as a file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from fastapi.responses import StreamingResponse

from api.context import Caller, Query, TheContext, use_cases
from api.http.concurrency import TOO_MANY
from api.http.downloads import PIECE_BYTES, attachment
from api.http.waiting import limited, unless_over
from api.problems import Refused, declare
from dray.filters import JobTableFile
from service.tracking.job_tables import JobTables

router = APIRouter(prefix="/v1/job-table", tags=["tracking"])
TheTables = Annotated[JobTables, use_cases(lambda runtime: JobTables(runtime.database))]
MEDIA_TYPES = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet"}
FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {
            kind: {"schema": {"type": "string", "format": "binary"}}
            for kind in MEDIA_TYPES.values()
        },
    }
}


class TableQuery(JobTableFile, Query):
    pass


@router.get(
    "",
    operation_id="export_jobs",
    response_class=Response,
    responses={**FILE, **declare("invalid_parameter", "invalid_search", TOO_MANY)},
)
async def export_jobs(
    request: Request,
    context: TheContext,
    tables: TheTables,
    caller: Caller,
    query: Annotated[TableQuery, QueryParameters()],
) -> Response:
    """Write a list of at most 100,000 jobs to a file, with a row for each job.

    The response begins when the whole file has been written. The server writes one file per caller
    at a time. A few more requests wait, and all further requests are refused with 429.
    """
    chosen = query.model_copy(update={"owner": caller}) if query.owner == "@me" else query
    with ExitStack() as closing:
        file = closing.enter_context(tempfile.TemporaryFile())
        async with limited(request, context.tables):
            size = await unless_over(context, request, tables.write(chosen, file))
        if size is None:
            raise Refused("unavailable", "the server is stopping", None, "try again soon")
        closing.pop_all()  # the response closes the file
    headers = {**attachment(f"jobs.{query.format}"), "Content-Length": str(size)}
    headers["Cache-Control"] = "no-store"
    return StreamingResponse(_pieces(file), headers=headers, media_type=MEDIA_TYPES[query.format])


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        file.seek(0)
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
