"""Serves `/openapi.json`, and `/docs`, the reference page that is generated from it.

Like the manual, both are the same for all users and contain no data about jobs, so no token is
required to get them.
"""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from api import reference
from api.context import NoParameters
from api.http.caching import answer_json

router = APIRouter(include_in_schema=False, dependencies=[NoParameters])


@router.get("/openapi.json")
async def description(request: Request) -> Response:
    """Return the OpenAPI document, which describes the API for programs."""
    return answer_json(request, json.dumps(request.app.openapi()).encode())


@router.get("/docs")
async def page(request: Request) -> Response:
    """Return the description of the API as a web page."""
    state = request.app.state
    if not hasattr(state, "reference"):
        state.reference = reference.render(request.app.openapi())
    headers = {"Content-Security-Policy": reference.POLICY, "Cache-Control": "private, no-cache"}
    return HTMLResponse(state.reference, headers=headers)
