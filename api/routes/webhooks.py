"""/v1/webhooks: URLs that are notified when jobs reach certain states."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field, StrictBool

from api.context import (
    Caller,
    NoParameters,
    PageQuery,
    TheContext,
    Whose,
    refuse_unless_admin,
    use_cases,
)
from api.http import body
from api.http.caching import answer, fresh
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.requests import WebhookRequest
from dray.spec.fields import Document
from service.webhooks.service import Webhooks

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])
TheWebhooks = Annotated[
    Webhooks, use_cases(lambda runtime: Webhooks(runtime.database, runtime.settings))
]

ONE = ("invalid_parameter", "webhook_not_found")


@router.post(
    "",
    operation_id="create_webhook",
    status_code=201,
    response_model=views.Webhook,
    openapi_extra=json_body(WebhookRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "webhook_url_forbidden", "unknown_queue", "too_many_webhooks"),
)
async def create(
    request: Request, context: TheContext, webhooks: TheWebhooks, caller: Caller
) -> Response:
    """Create a webhook that is notified about your jobs. An admin's webhook can be notified about
    the jobs of all users. The secret that signs the messages is shown only in this response."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(WebhookRequest, request, limit_bytes)
    if wanted.all_users:
        refuse_unless_admin(context, caller, "be notified of the jobs of all users")
    hook = await webhooks.create(wanted, owner=caller)
    return fresh(hook, 201, {"Location": f"/v1/webhooks/{hook.id}"})


@router.get(
    "",
    operation_id="list_webhooks",
    response_model=views.WebhookPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def list_webhooks(request: Request, webhooks: TheWebhooks, owner: Whose) -> Response:
    """List your webhooks, oldest first. Admins see the webhooks of all users."""
    return answer(request, await webhooks.list(owner=owner))


@router.get(
    "/{webhook_id}",
    operation_id="get_webhook",
    response_model=views.Webhook,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def get(request: Request, webhooks: TheWebhooks, owner: Whose, webhook_id: str) -> Response:
    """Show a webhook, without its secret, and whether its receiver accepts messages."""
    return answer(request, await webhooks.get(webhook_id, owner=owner))


class WebhookChangeRequest(Document):
    """Enable or disable a webhook."""

    enabled: StrictBool


@router.patch(
    "/{webhook_id}",
    operation_id="change_webhook",
    response_model=views.Webhook,
    openapi_extra=json_body(WebhookChangeRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "webhook_not_found"),
)
async def change(
    request: Request,
    context: TheContext,
    webhooks: TheWebhooks,
    caller: Caller,
    owner: Whose,
    webhook_id: str,
) -> Response:
    """Disable or enable a webhook. Disabling a webhook discards its waiting messages. A webhook
    that is enabled again is notified only about later events. A webhook that was enabled by an
    admin works even if its owner no longer has a token."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(WebhookChangeRequest, request, limit_bytes)
    hook = await webhooks.set_enabled(webhook_id, enabled=wanted.enabled, owner=owner, actor=caller)
    return fresh(hook, 200)


@router.delete(
    "/{webhook_id}",
    operation_id="delete_webhook",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def delete(webhooks: TheWebhooks, owner: Whose, webhook_id: str) -> Response:
    """Delete a webhook with its messages, including waiting messages."""
    await webhooks.delete(webhook_id, owner=owner)
    return Response(status_code=204)


@router.post(
    "/{webhook_id}/test",
    operation_id="test_webhook",
    status_code=202,
    response_model=views.WebhookDelivery,
    dependencies=[NoParameters],
    responses=declare(*ONE, "webhook_disabled"),
)
async def test(webhooks: TheWebhooks, owner: Whose, webhook_id: str) -> Response:
    """Send a test message ahead of all waiting messages, without retries. A moment later, the list
    of deliveries shows the receiver's response."""
    return fresh(await webhooks.test(webhook_id, owner=owner), 202)


class DeliveriesQuery(PageQuery):
    limit: Annotated[int, Field(ge=1, le=500)] = 50


@router.get(
    "/{webhook_id}/deliveries",
    operation_id="list_webhook_deliveries",
    response_model=views.WebhookDeliveryPage,
    responses=declare(*ONE, "bad_cursor"),
)
async def deliveries(
    request: Request,
    webhooks: TheWebhooks,
    owner: Whose,
    webhook_id: str,
    query: Annotated[DeliveriesQuery, QueryParameters()],
) -> Response:
    """List the messages of a webhook, newest first, each with the receiver's last response."""
    page = await webhooks.deliveries(
        webhook_id, owner=owner, limit=query.limit, cursor=query.cursor
    )
    return answer(request, page)
