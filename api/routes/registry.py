"""/v1/models: the registry of models, whose versions are results and checkpoints of jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters

from api.context import Caller, NoParameters, PageQuery, TheCaller, TheContext, use_cases
from api.http import body
from api.http.caching import answer, fresh
from api.http.concurrency import TOO_MANY
from api.http.waiting import limited
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.input import model_names
from dray.model_requests import AliasRequest, CardRequest, RegistrationRequest
from service.tracking.registry import Registry

router = APIRouter(prefix="/v1/models", tags=["models"])
TheRegistry = Annotated[
    Registry, use_cases(lambda runtime: Registry(runtime.database, runtime.storage))
]
AliasName = Annotated[str, Path(pattern=model_names.ALIAS)]
Number = Annotated[int, Path(ge=1, le=model_names.MAX_VERSION)]

ONE = ("malformed_request", "invalid_parameter", "model_not_found")
VERSION = (*ONE, "model_version_not_found")


@router.post(
    "",
    operation_id="register_model",
    status_code=201,
    response_model=views.ModelVersion,
    openapi_extra=json_body(RegistrationRequest),
    dependencies=[NoParameters],
    responses={
        200: {"description": "It was already a version of the model.", "model": views.ModelVersion},
        **declare(*BODY, "job_not_found", "checkpoint_not_found", "storage_unavailable"),
    },
)
async def register(
    request: Request, context: TheContext, registry: TheRegistry, caller: TheCaller
) -> Response:
    """Register the result of a job that has ended, or one of its checkpoints, as the next version
    of a model. The job can't be deleted while the version exists."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(RegistrationRequest, request, limit_bytes)
    version, created = await registry.register(wanted, caller)
    return fresh(version, 201 if created else 200)


@router.get(
    "",
    operation_id="list_models",
    response_model=views.RegisteredModelPage,
    responses=declare("invalid_parameter", "bad_cursor", TOO_MANY),
)
async def list_models(
    request: Request,
    registry: TheRegistry,
    _: Caller,
    query: Annotated[PageQuery, QueryParameters()],
) -> Response:
    """List the registered models of all users in the order of their names."""
    async with limited(request):
        return answer(request, await registry.models(limit=query.limit, cursor=query.cursor))


@router.get(
    "/{name}",
    operation_id="get_model",
    response_model=views.RegisteredModel,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def get_model(request: Request, registry: TheRegistry, _: Caller, name: str) -> Response:
    """Show a model and its aliases. As in all calls, the case of the name is ignored."""
    return answer(request, await registry.model(name))


@router.delete(
    "/{name}",
    operation_id="delete_model",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def delete_model(registry: TheRegistry, caller: TheCaller, name: str) -> Response:
    """Delete a model with its versions and aliases. The jobs remain. Only for the model's owner and
    for admins."""
    await registry.delete(name, caller)
    return Response(status_code=204)


@router.get(
    "/{name}/versions",
    operation_id="list_model_versions",
    response_model=views.ModelVersionPage,
    responses=declare(*ONE, "bad_cursor", TOO_MANY),
)
async def versions(
    request: Request,
    registry: TheRegistry,
    _: Caller,
    name: str,
    query: Annotated[PageQuery, QueryParameters()],
) -> Response:
    """List the versions of a model, the highest number first."""
    async with limited(request):
        page = await registry.versions(name, limit=query.limit, cursor=query.cursor)
    return answer(request, page)


@router.get(
    "/{name}/versions/{version}",
    operation_id="get_model_version",
    response_model=views.ModelVersion,
    dependencies=[NoParameters],
    responses=declare(*VERSION, "storage_unavailable"),
)
async def get_version(
    request: Request, registry: TheRegistry, _: Caller, name: str, version: str
) -> Response:
    """Show a version with its card, its lineage and its files. `version` is the number of the
    version, or an alias."""
    return answer(request, await registry.version(name, _number_or_alias(version)))


@router.patch(
    "/{name}/versions/{version}",
    operation_id="change_model_version",
    response_model=views.ModelVersion,
    openapi_extra=json_body(CardRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *VERSION, "storage_unavailable"),
)
async def change_version(
    request: Request,
    context: TheContext,
    registry: TheRegistry,
    caller: TheCaller,
    name: str,
    version: str,
) -> Response:
    """Replace the card of a version. Only for the model's owner and for admins."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(CardRequest, request, limit_bytes)
    number = _number_or_alias(version)
    await registry.set_card(name, number, wanted.card, caller)
    return fresh(await registry.version(name, number), 200)


@router.delete(
    "/{name}/versions/{version}",
    operation_id="delete_model_version",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(*VERSION, "version_in_use"),
)
async def delete_version(
    registry: TheRegistry, caller: TheCaller, name: str, version: Number
) -> Response:
    """Delete a version to which no alias refers. Its job remains, and its number is not used again.
    Only for the model's owner and for admins."""
    await registry.delete_version(name, version, caller)
    return Response(status_code=204)


@router.put(
    "/{name}/aliases/{alias}",
    operation_id="set_model_alias",
    response_model=views.RegisteredModel,
    openapi_extra=json_body(AliasRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *VERSION, "alias_moved"),
)
async def set_alias(
    request: Request,
    context: TheContext,
    registry: TheRegistry,
    caller: TheCaller,
    name: str,
    alias: AliasName,
) -> Response:
    """Let an alias refer to a version. Only for the model's owner and for admins."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(AliasRequest, request, limit_bytes)
    await registry.move(name, alias, wanted, caller)
    return fresh(await registry.model(name), 200)


@router.delete(
    "/{name}/aliases/{alias}",
    operation_id="delete_model_alias",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def delete_alias(
    registry: TheRegistry, caller: TheCaller, name: str, alias: AliasName
) -> Response:
    """Remove an alias. Removing an alias that does not exist has no effect. Only for the model's
    owner and for admins."""
    await registry.remove_alias(name, alias, caller)
    return Response(status_code=204)


@router.get(
    "/{name}/moves",
    operation_id="list_alias_moves",
    response_model=views.AliasMovePage,
    responses=declare(*ONE, "bad_cursor", TOO_MANY),
)
async def moves(
    request: Request,
    registry: TheRegistry,
    _: Caller,
    name: str,
    query: Annotated[PageQuery, QueryParameters()],
) -> Response:
    """List the changes of a model's aliases with the users who made them, the newest first."""
    async with limited(request):
        page = await registry.moves(name, limit=query.limit, cursor=query.cursor)
    return answer(request, page)


def _number_or_alias(version: str) -> int | str:
    return (
        int(version) if version.isascii() and version.isdigit() and len(version) < 10 else version
    )
