"""Serves the web page at `/`, the files of the web page at `/page`, and the manual at `/manual`.

All of these files are the same for all users and contain no data about jobs, so no token is
required to get them. The page asks the user for a token if the API requires one. Query parameters
that other sites append to a link, such as `?utm_source=x`, are ignored.
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
    """Serve the HTML file of the web page, which refers to its other files."""
    return _answer(request, load().index, "no-cache")


@router.head("/page/{version}/{path:path}")
@router.get("/page/{version}/{path:path}")
async def static_file(request: Request, version: str, path: str) -> Response:
    """Serve a file of the web page. Requests for another version are refused, because files of
    different versions don't work together."""
    found = load()
    file = found.files.get(path) if version == found.version else None
    if file is None:
        raise Refused(
            "not_found", "the web page has no file with this name", hint="reload the page"
        )
    return _answer(request, file, FOR_GOOD)


@router.head("/manual")
@router.get("/manual")
async def manual_without_slash(request: Request) -> Response:
    """Redirect to `/manual/`, because the links in the manual are relative to this URL."""
    return RedirectResponse("manual/")


@router.head("/manual/{path:path}")
@router.get("/manual/{path:path}")
async def manual_file(request: Request, path: str) -> Response:
    """Serve a file of the manual. If the manual has not been built, serve a page that explains how
    to build it."""
    file = await asyncio.to_thread(manual.find, path)
    if file is not None:
        return _answer(request, file, "no-cache")
    if await asyncio.to_thread(manual.find, "") is not None:
        raise Refused("not_found", "the manual has no such page", hint="start at manual/")
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
