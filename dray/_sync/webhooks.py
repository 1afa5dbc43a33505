# Written by `make blocking` from dray/_async/webhooks.py: change that file instead.
"""Webhooks, which notify a URL about jobs."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence

from dray import views
from dray._http.transport import Call, params, present, segment
from dray._sync.calls import Calls
from dray.views import DeliveryStatus, JobState, WebhookFormat

PAGE = 100
TEST_PATIENCE_S = 30.0
LOOK_S = 0.2


class WebhookCalls(Calls):
    def create_webhook(
        self,
        url: str,
        *,
        states: Sequence[JobState | str] | None = None,
        queue: str | None = None,
        labels: Mapping[str, str] | None = None,
        format: WebhookFormat | str | None = None,  # noqa: A002  the API's word
        all_users: bool = False,
    ) -> views.Webhook:
        """Notify a URL when one of your jobs enters one of `states`; by default, when it ends. With
        `all_users`, which is only for admins, the webhook is notified about the jobs of all users.
        `queue` and `labels` restrict the webhook to matching jobs. `secret` in the result is the
        key for the signatures; no other call returns the key. Raises WebhookUrlForbidden,
        UnknownQueue or TooManyWebhooks.
        """
        given = present(
            url=url,
            states=None if states is None else [JobState(state) for state in states],
            queue=queue,
            labels=None if labels is None else dict(labels),
            format=None if format is None else WebhookFormat(format),
            all_users=all_users or None,
        )
        return self._read(views.Webhook, Call.with_json("POST", "/v1/webhooks", given))

    def webhooks(self) -> list[views.Webhook]:
        """Return your webhooks, oldest first. Admins get the webhooks of all users."""
        return self._list(views.WebhookPage, "/v1/webhooks")

    def webhook(self, webhook_id: str) -> views.Webhook:
        """Return the webhook, without its secret. Raises WebhookNotFound if you have no such
        webhook."""
        return self._read(views.Webhook, Call("GET", _path(webhook_id)))

    def enable_webhook(self, webhook_id: str) -> views.Webhook:
        """Enable a disabled webhook. The webhook is notified only of state changes after this
        call."""
        call = Call.with_json("PATCH", _path(webhook_id), {"enabled": True})
        return self._read(views.Webhook, call)

    def disable_webhook(self, webhook_id: str) -> views.Webhook:
        """Disable a webhook, and discard its pending messages."""
        call = Call.with_json("PATCH", _path(webhook_id), {"enabled": False})
        return self._read(views.Webhook, call)

    def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook and its messages."""
        self._send(Call("DELETE", _path(webhook_id)))

    def test_webhook(self, webhook_id: str, *, wait: bool = True) -> views.WebhookDelivery:
        """Send a test message to a webhook. Returns the message with the receiver's response. With
        `wait=False`, returns the message without waiting for the response. Raises
        WebhookDisabled."""
        sent = self._read(views.WebhookDelivery, Call("POST", f"{_path(webhook_id)}/test"))
        asked = self._clock()
        while wait and sent.status is DeliveryStatus.WAITING:
            if self._clock() - asked > TEST_PATIENCE_S:
                break
            time.sleep(LOOK_S)
            call = Call("GET", f"{_path(webhook_id)}/deliveries", params(limit=PAGE))
            page = self._read(views.WebhookDeliveryPage, call)
            sent = next((each for each in page.items if each.id == sent.id), sent)
        return sent

    def webhook_deliveries(self, webhook_id: str) -> Generator[views.WebhookDelivery, None, None]:
        """Yield the messages of a webhook, newest first, with the receiver's last responses."""
        path = f"{_path(webhook_id)}/deliveries"
        return self._items(views.WebhookDeliveryPage, path, page_size=PAGE)


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{segment(webhook_id)}"
