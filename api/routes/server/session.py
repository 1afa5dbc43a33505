"""/session: a browser stays signed in, or signs out.

The route is not under `/v1`, because the browser sends the cookie only with addresses in the folder
of the route.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters

from api.context import Caller, NoParameters, Query, TheContext
from api.http.caching import fresh
from api.problems import declare
from dray import views

router = APIRouter(prefix="/session", tags=["sign-in"])


class SignOutQuery(Query):
    everywhere: bool = False
    """Also sign out the caller's other browsers."""


@router.post(
    "",
    operation_id="sign_in_browser",
    status_code=201,
    response_model=views.SignedIn,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def sign_in(request: Request, context: TheContext) -> Response:
    """Sign in a browser for 30 days, as the owner of the token in `Authorization`. The response
    sets a cookie that permits reading. A change that is authorised by the cookie needs `write_key`
    in the header `X-Dray-Write-Key`.

    The browser is signed out when the token is removed or replaced. A user can sign in 100
    browsers; another sign-in signs out the browser that has been signed in longest."""
    session, cookie = await context.sign_in.open(request)
    request.state.caller = session.owner
    view = views.SignedIn(
        user=session.owner, write_key=session.write_key, expires_at=session.expires_at
    )
    return fresh(view, 201, {"Set-Cookie": cookie})


@router.delete(
    "",
    operation_id="sign_out_browser",
    status_code=204,
    responses=declare("invalid_parameter"),
)
async def sign_out(
    request: Request,
    context: TheContext,
    caller: Caller,
    query: Annotated[SignOutQuery, QueryParameters()],
) -> Response:
    """Sign out the browser that sends its cookie. Requests with a copy of the cookie are refused
    from now on, and streams end."""
    cookie = await context.sign_in.close(request)
    if query.everywhere:
        await context.sign_in.close_all(caller)
    headers = {"Set-Cookie": cookie, "Cache-Control": "no-store"}
    return Response(status_code=204, headers=headers)
