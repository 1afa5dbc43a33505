"""Use cases for webhooks: create, list, show, enable, disable, test and delete webhooks, and list
their messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from urllib.parse import urlsplit

from sqlalchemy.orm import Session

from dray import views
from dray.requests import WebhookRequest
from dray.views import DeliveryStatus, JobState, WebhookFormat
from ray_workers.shared.net_policy import AllowedHosts
from service.config.settings import Settings
from service.db.models import WebhookDeliveryRow, WebhookRow
from service.db.notifications import WEBHOOKS
from service.db.repositories import webhooks as repository
from service.db.session import Database, notify, touch
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import (
    BadCursor,
    TooManyWebhooks,
    WebhookDisabled,
    WebhookNotFound,
    WebhookUrlForbidden,
)
from service.domain.ids import new_webhook_id
from service.domain.webhooks import MAX_PER_OWNER, TEST, message_id, new_secret
from service.jobs import data_policy
from service.queues import admission

logger = logging.getLogger(__name__)

BY_USER = "disabled_by_user"


class Webhooks:
    """Use cases for webhooks. `owner` is the user whose webhooks the caller may see; None means all
    users. Methods raise WebhookNotFound for any other webhook."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._private_hosts = AllowedHosts(settings.webhook_private_hosts or ())
        self._clock = clock or database.clock

    async def create(self, wanted: WebhookRequest, *, owner: str) -> views.Webhook:
        """Create a webhook and return it with its secret. Later responses do not contain the
        secret.

        Raises UnknownQueue or TooManyWebhooks, or WebhookUrlForbidden if the service must not
        connect to the address.
        """
        await self._refuse_host(wanted.url)
        now = self._clock()
        webhook_id, secret = new_webhook_id(now), new_secret()

        def work(session: Session) -> views.Webhook:
            touch(session)
            row = repository.get(session, webhook_id)
            if row is not None:  # an earlier commit succeeded, but its result was lost
                return _view(row, 0).model_copy(update={"secret": secret})
            if wanted.queue is not None:
                admission.locked(session, wanted.queue)
            if repository.count_of(session, owner) >= MAX_PER_OWNER:
                raise TooManyWebhooks(
                    f"{owner} has {MAX_PER_OWNER} webhooks, the maximum per user",
                    hint="delete a webhook that is no longer needed: `dray webhook ls` lists your "
                    "webhooks",
                )
            row = WebhookRow(
                id=webhook_id,
                owner=owner,
                url=wanted.url,
                format=wanted.format.value,
                states=[state.value for state in wanted.states],
                queue=wanted.queue,
                labels=dict(wanted.labels),
                all_users=wanted.all_users,
                secret=secret,
                failures=0,
                created_at=now,
            )
            repository.add(session, row)
            return _view(row, 0).model_copy(update={"secret": secret})

        hook = await self._database.write(work)
        logger.info("the webhook %s was created by %s", hook.id, owner)
        return hook

    async def _refuse_host(self, url: str) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        hint = (
            "the operator can allow private hosts, even without https, in "
            "DRAY_WEBHOOK_PRIVATE_HOSTS"
        )
        reason = await data_policy.why_refused(host, self._private_hosts)
        if reason is None and parts.scheme == "http":
            is_named = data_policy.is_named(host, self._private_hosts)
            reason = None if is_named else "messages are only sent over https://"
        if reason is not None:
            message = f"{host} is not allowed as a receiver: {reason}"
            raise WebhookUrlForbidden(message, pointer="/url", hint=hint)

    async def list(self, *, owner: str | None) -> views.WebhookPage:
        """List the webhooks, oldest first."""

        def work(session: Session) -> views.WebhookPage:
            rows = repository.every(session, owner)
            waiting = repository.num_waiting(session, [row.id for row in rows])
            return views.WebhookPage(items=[_view(row, waiting.get(row.id, 0)) for row in rows])

        return await self._database.read(work)

    async def get(self, webhook_id: str, *, owner: str | None) -> views.Webhook:
        return await self._database.read(
            lambda session: _shown(session, _found(session, webhook_id, owner))
        )

    async def set_enabled(
        self, webhook_id: str, *, enabled: bool, owner: str | None, actor: str
    ) -> views.Webhook:
        """Enable a webhook for future events, or disable it and discard its pending messages.
        Idempotent. If `actor` enables another user's webhook, `enabled_by` is set to `actor`."""
        now = self._clock()

        def work(session: Session) -> views.Webhook:
            touch(session)
            row = _found(session, webhook_id, owner, lock=True)
            if enabled:
                row.disabled_at = row.disabled_code = row.disabled_message = None
                row.failures, row.failing_since, row.paused_until = 0, None, None
                row.enabled_by = None if actor == row.owner else actor
            elif row.disabled_at is None:
                row.disabled_at, row.disabled_code = now, BY_USER
                row.disabled_message = "a user disabled it"
                repository.drop_waiting(session, row.id)
            return _shown(session, row)

        return await self._database.write(work)

    async def delete(self, webhook_id: str, *, owner: str | None) -> None:
        def work(session: Session) -> None:
            touch(session)
            repository.remove(session, _found(session, webhook_id, owner, lock=True).id)

        await self._database.write(work)
        logger.info("the webhook %s was deleted", webhook_id)

    async def test(self, webhook_id: str, *, owner: str | None) -> views.WebhookDelivery:
        """Send a test message immediately, without retries. Raises WebhookDisabled if the webhook
        is disabled."""
        now = self._clock()

        def work(session: Session) -> views.WebhookDelivery:
            touch(session)
            row = _found(session, webhook_id, owner, lock=True)
            if row.disabled_at is not None:
                raise WebhookDisabled(
                    f"the webhook {webhook_id} is disabled: {row.disabled_message}",
                    hint=f"`dray webhook enable {webhook_id}` enables the webhook",
                )
            row.paused_until = None
            message = WebhookDeliveryRow(
                webhook_id=row.id,
                type=TEST,
                data={"webhook": row.id},
                status=DeliveryStatus.WAITING.value,
                tries=0,
                created_at=now,
                next_try_at=row.created_at,  # so that it is sent first
            )
            repository.add_delivery(session, message)
            notify(session, WEBHOOKS)
            return _delivery(message)

        return await self._database.write(work)

    async def deliveries(
        self, webhook_id: str, *, owner: str | None, limit: int = 50, cursor: str | None = None
    ) -> views.WebhookDeliveryPage:
        """List the webhook's messages, newest first. Raises BadCursor for a cursor from another
        listing."""
        before = None
        if cursor is not None:
            before = decode_cursor(webhook_id, cursor)
            if type(before) is not int or not 0 <= before < 2**63:
                raise BadCursor("the cursor does not belong to this listing")

        def work(session: Session) -> views.WebhookDeliveryPage:
            row = _found(session, webhook_id, owner)
            rows = repository.deliveries(session, row.id, before, limit + 1)
            more = len(rows) > limit
            return views.WebhookDeliveryPage(
                items=[_delivery(each) for each in rows[:limit]],
                next_cursor=encode_cursor(webhook_id, rows[limit - 1].number) if more else None,
            )

        return await self._database.read(work)


def _found(
    session: Session, webhook_id: str, owner: str | None, *, lock: bool = False
) -> WebhookRow:
    row = repository.get(session, webhook_id, lock=lock) if storable(webhook_id) else None
    if row is None or owner not in (None, row.owner):
        raise WebhookNotFound(
            f"there is no webhook {webhook_id}",
            hint="`dray webhook ls` lists the existing webhooks",
        )
    return row


def _shown(session: Session, row: WebhookRow) -> views.Webhook:
    return _view(row, repository.num_waiting(session, [row.id]).get(row.id, 0))


def _view(row: WebhookRow, num_waiting: int) -> views.Webhook:
    reason = None
    if row.disabled_code is not None:
        reason = views.Reason(code=row.disabled_code, message=row.disabled_message or "")
    return views.Webhook(
        id=row.id,
        owner=row.owner,
        url=row.url,
        format=WebhookFormat(row.format),
        states=[JobState(state) for state in row.states],
        queue=row.queue,
        labels=row.labels,
        all_users=row.all_users,
        enabled=row.disabled_at is None,
        disabled_reason=reason,
        enabled_by=row.enabled_by,
        failing_since=row.failing_since,
        paused_until=row.paused_until,
        num_waiting=num_waiting,
        created_at=row.created_at,
    )


def _delivery(row: WebhookDeliveryRow) -> views.WebhookDelivery:
    answer = None
    if row.tried_at is not None:
        answer = views.DeliveryAnswer(
            status=row.answer_status,
            body=row.answer_body or "",
            error=row.answer_error,
            took_s=row.took_s or 0.0,
        )
    return views.WebhookDelivery(
        id=message_id(row.webhook_id, row.number),
        type=row.type,
        job_id=row.job_id,
        status=DeliveryStatus(row.status),
        tries=row.tries,
        created_at=row.created_at,
        tried_at=row.tried_at,
        next_try_at=row.next_try_at,
        answer=answer,
    )
