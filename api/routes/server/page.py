"""`/`, the web page, `/page`, the files that it consists of, and `/manual`, the manual.

They are the same for everybody and hold nothing of any job, so they ask for no token: the page asks
its reader for one, when the API asks the page. A query that others append to a link, such as
`?utm_source=x`, is ignored.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from api.http.caching import accepts_gzip, etag_of, is_known
from api.page import manual
from api.page.static_files import POLICY, StaticFile, load
from api.problems import Refused

router = APIRouter(include_in_schema=False)

FOR_GOOD = "public, max-age=31536000, immutable"


@router.head("/")
@router.get("/")
async def index(request: Request) -> Response:
    """The page, which names its other files."""
    return _answer(request, load().index, "no-cache")


@router.head("/page/{version}/{path:path}")
@router.get("/page/{version}/{path:path}")
async def static_file(request: Request, version: str, path: str) -> Response:
    """A file of the page. The files of another version are not there: they would not fit."""
    found = load()
    file = found.files.get(path) if version == found.version else None
    if file is None:
        raise Refused("not_found", "the page has no such file", hint="load the page anew")
    return _answer(request, file, FOR_GOOD)


@router.head("/manual")
@router.get("/manual")
async def manual_without_slash(request: Request) -> Response:
    """The manual's files name each other by paths that are relative to `/manual/`."""
    return RedirectResponse("manual/")


@router.head("/manual/{path:path}")
@router.get("/manual/{path:path}")
async def manual_file(request: Request, path: str) -> Response:
    """A file of the manual; if the manual was not built, a page that says how to build it."""
    file = await asyncio.to_thread(manual.find, path)
    if file is not None:
        return _answer(request, file, "no-cache")
    if await asyncio.to_thread(manual.find, "") is not None:
        raise Refused("not_found", "the manual has no such page", hint="begin at manual/")
    return HTMLResponse(manual.NOT_BUILT, 404, {"Content-Security-Policy": POLICY})


def _answer(request: Request, file: StaticFile, caching: str) -> Response:
    etag = etag_of(file.body)
    headers = {
        "Cache-Control": caching,
        "Content-Security-Policy": POLICY,
        "ETag": etag,
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept-Encoding",
    }
    if is_known(request, etag):
        return Response(status_code=304, headers=headers)
    if not accepts_gzip(request):
        return Response(file.body, media_type=file.media_type, headers=headers)
    headers |= {"Content-Encoding": "gzip", "ETag": f"W/{etag}"}
    return Response(file.compressed, media_type=file.media_type, headers=headers)
