"""/v1/views: lists of jobs that users store under names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import (
    Caller,
    NoParameters,
    PageQuery,
    Query,
    TheContext,
    refuse_unless_admin,
    use_cases,
)
from api.http import body
from api.http.caching import answer, fresh
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.saved_views import SavedViewRequest
from dray.spec.fields import QUEUE_NAME
from service.tracking.saved_views import SavedViews

router = APIRouter(prefix="/v1/views", tags=["tracking"])
TheViews = Annotated[SavedViews, use_cases(lambda runtime: SavedViews(runtime.database))]
ViewName = Annotated[str, Path(max_length=63, pattern=QUEUE_NAME)]


class ViewQuery(Query):
    owner: Annotated[str | None, Field(min_length=1, max_length=255)] = None
    """The view's owner; by default the caller."""


class ViewsQuery(PageQuery):
    owner: Annotated[str | None, Field(max_length=255)] = None
    """Only views of this owner; `@me` means the caller."""
    project: Annotated[str | None, Field(max_length=255)] = None
    """Only views for this project."""


@router.get(
    "",
    operation_id="list_views",
    response_model=views.SavedViewPage,
    responses=declare("invalid_parameter", "bad_cursor"),
)
async def list_views(
    request: Request,
    saved: TheViews,
    caller: Caller,
    query: Annotated[ViewsQuery, QueryParameters()],
) -> Response:
    """List the saved views of all users, by name and owner."""
    owner = caller if query.owner == "@me" else query.owner
    found = await saved.list(owner, query.project, limit=query.limit, cursor=query.cursor)
    return answer(request, found)


@router.get(
    "/{name}",
    operation_id="get_view",
    response_model=views.SavedView,
    responses=declare("invalid_parameter", "view_not_found"),
)
async def get_view(
    request: Request,
    saved: TheViews,
    caller: Caller,
    name: ViewName,
    query: Annotated[ViewQuery, QueryParameters()],
) -> Response:
    """Show a saved view of the caller, or of `owner`."""
    return answer(request, await saved.get(query.owner or caller, name))


@router.put(
    "/{name}",
    operation_id="put_view",
    response_model=views.SavedView,
    openapi_extra=json_body(SavedViewRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "invalid_search", "too_many_views"),
)
async def put_view(
    request: Request, context: TheContext, saved: TheViews, caller: Caller, name: ViewName
) -> Response:
    """Save a list of jobs under a name, or replace the caller's view with this name."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(SavedViewRequest, request, limit_bytes)
    return fresh(await saved.put(name, wanted, owner=caller), 200)


@router.delete(
    "/{name}",
    operation_id="delete_view",
    status_code=204,
    response_class=Response,
    responses=declare("invalid_parameter", "view_not_found", "forbidden"),
)
async def delete_view(
    context: TheContext,
    saved: TheViews,
    caller: Caller,
    name: ViewName,
    query: Annotated[ViewQuery, QueryParameters()],
) -> Response:
    """Delete a saved view of the caller. Admins can also delete views of other users."""
    owner = query.owner or caller
    if owner != caller:
        refuse_unless_admin(context, caller, "delete another user's view")
    await saved.delete(owner, name)
    return Response(status_code=204)
