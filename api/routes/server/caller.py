"""/v1/caller: who the caller is, so that a client can offer what the caller may do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import NoParameters, TheCaller
from api.http.caching import answer
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/caller", tags=["server"])


@router.get(
    "",
    operation_id="get_caller",
    response_model=views.CallerInfo,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def get(request: Request, caller: TheCaller) -> Response:
    """Show the name of the caller, and whether the caller is an admin. On a server without tokens,
    every caller is an admin."""
    return answer(request, views.CallerInfo(name=caller.name, is_admin=caller.is_admin))
