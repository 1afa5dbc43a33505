"""Webhooks: addresses that are told about jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

from dray import views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http import webhooks
from dray.views import JobState, WebhookFormat


class WebhookCalls(BlockingCalls):
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
        """Have an address told when your jobs, or with `all_users` everybody's (for admins), come
        to one of `states`; by default when they end. `queue` and `labels` choose among them.

        `secret` of the answer is the key of the signatures, and is told this once. Raises
        WebhookUrlForbidden, UnknownQueue or TooManyWebhooks.
        """
        flow = webhooks.create(
            *(self._flows, url, states, queue, labels, format), all_users=all_users
        )
        return self._driver.run(flow)

    def webhooks(self) -> list[views.Webhook]:
        """Your webhooks, oldest first; for admins, everybody's."""
        return self._driver.run(webhooks.every(self._flows))

    def webhook(self, webhook_id: str) -> views.Webhook:
        """The webhook, without its secret; raises WebhookNotFound if you have no such one."""
        return self._driver.run(webhooks.get(self._flows, webhook_id))

    def enable_webhook(self, webhook_id: str) -> views.Webhook:
        """Have a disabled webhook notified of what happens from now on."""
        return self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=True))

    def disable_webhook(self, webhook_id: str) -> views.Webhook:
        """Send nothing more to it; messages that wait are dropped."""
        return self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=False))

    def delete_webhook(self, webhook_id: str) -> None:
        """Remove a webhook with its messages."""
        self._driver.run(webhooks.delete(self._flows, webhook_id))

    def test_webhook(self, webhook_id: str, *, wait: bool = True) -> views.WebhookDelivery:
        """Send it a message about no job. Returns that with the receiver's answer, or with
        `wait=False` at once. Raises WebhookDisabled."""
        return self._driver.run(webhooks.test(self._flows, webhook_id, wait=wait))

    def webhook_deliveries(self, webhook_id: str) -> Generator[views.WebhookDelivery, None, None]:
        """Its messages with the receiver's last answers, newest first."""
        return self._driver.iterate(webhooks.deliveries(self._flows, webhook_id))


class AsyncWebhookCalls(AsyncCalls):
    """See `WebhookCalls`, which has the same arguments, answers and errors."""

    async def create_webhook(
        self,
        url: str,
        *,
        states: Sequence[JobState | str] | None = None,
        queue: str | None = None,
        labels: Mapping[str, str] | None = None,
        format: WebhookFormat | str | None = None,  # noqa: A002  the API's word
        all_users: bool = False,
    ) -> views.Webhook:
        flow = webhooks.create(
            *(self._flows, url, states, queue, labels, format), all_users=all_users
        )
        return await self._driver.run(flow)

    async def webhooks(self) -> list[views.Webhook]:
        return await self._driver.run(webhooks.every(self._flows))

    async def webhook(self, webhook_id: str) -> views.Webhook:
        return await self._driver.run(webhooks.get(self._flows, webhook_id))

    async def enable_webhook(self, webhook_id: str) -> views.Webhook:
        return await self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=True))

    async def disable_webhook(self, webhook_id: str) -> views.Webhook:
        return await self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=False))

    async def delete_webhook(self, webhook_id: str) -> None:
        await self._driver.run(webhooks.delete(self._flows, webhook_id))

    async def test_webhook(self, webhook_id: str, *, wait: bool = True) -> views.WebhookDelivery:
        return await self._driver.run(webhooks.test(self._flows, webhook_id, wait=wait))

    def webhook_deliveries(self, webhook_id: str) -> AsyncGenerator[views.WebhookDelivery, None]:
        return self._driver.iterate(webhooks.deliveries(self._flows, webhook_id))
