"""Webhooks as flows, without I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dray import views
from dray._http.calls import Calls, params
from dray._http.transport import Call, Flow, Item, Sleep, Stream, segment
from dray.views import DeliveryStatus, JobState, WebhookFormat

HEADERS = {"Content-Type": "application/json"}
PAGE = 100
TEST_PATIENCE_S = 30.0
LOOK_S = 0.2


def create(
    calls: Calls,
    url: str,
    states: Sequence[JobState | str] | None,
    queue: str | None,
    labels: Mapping[str, str] | None,
    format_: WebhookFormat | str | None,
    *,
    all_users: bool,
) -> Flow[views.Webhook]:
    """None stands for the server's default."""
    wanted = {
        "url": url,
        "states": None if states is None else [JobState(state) for state in states],
        "queue": queue,
        "labels": None if labels is None else dict(labels),
        "format": None if format_ is None else WebhookFormat(format_),
        "all_users": all_users or None,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    call = Call("POST", "/v1/webhooks", (), HEADERS, json.dumps(given).encode())
    return (yield from calls.read(views.Webhook, call))


def every(calls: Calls) -> Flow[list[views.Webhook]]:
    return (yield from calls.read(views.WebhookPage, Call("GET", "/v1/webhooks"))).items


def get(calls: Calls, webhook_id: str) -> Flow[views.Webhook]:
    return (yield from calls.read(views.Webhook, Call("GET", _path(webhook_id))))


def enable(calls: Calls, webhook_id: str, *, enabled: bool) -> Flow[views.Webhook]:
    content = json.dumps({"enabled": enabled}).encode()
    call = Call("PATCH", _path(webhook_id), (), HEADERS, content)
    return (yield from calls.read(views.Webhook, call))


def delete(calls: Calls, webhook_id: str) -> Flow[None]:
    yield from calls.send(Call("DELETE", _path(webhook_id)))


def test(calls: Calls, webhook_id: str, *, wait: bool) -> Flow[views.WebhookDelivery]:
    """wait: for the receiver's answer, as long as one may take."""
    call = Call("POST", f"{_path(webhook_id)}/test")
    sent = yield from calls.read(views.WebhookDelivery, call)
    asked = calls.connection.retry.clock()
    while wait and sent.status is DeliveryStatus.WAITING:
        if calls.connection.retry.clock() - asked > TEST_PATIENCE_S:
            break
        yield Sleep(LOOK_S)
        page = yield from _page(calls, webhook_id, None)
        sent = next((each for each in page.items if each.id == sent.id), sent)
    return sent


def deliveries(calls: Calls, webhook_id: str) -> Stream[views.WebhookDelivery]:
    """Newest first; pages are fetched as they are needed."""
    cursor: str | None = None
    while True:
        page = yield from _page(calls, webhook_id, cursor)
        for each in page.items:
            yield Item(each)
        cursor = page.next_cursor
        if cursor is None:
            return


def _page(calls: Calls, webhook_id: str, cursor: str | None) -> Flow[views.WebhookDeliveryPage]:
    query = params(limit=PAGE, cursor=cursor)
    call = Call("GET", f"{_path(webhook_id)}/deliveries", query)
    return (yield from calls.read(views.WebhookDeliveryPage, call))


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{segment(webhook_id)}"
