"""The loop that sends webhook messages.

The messages of a webhook are sent one at a time, in the order of the changes. Webhooks take turns.
After a failure, a webhook pauses. The pause doubles with each failure, and only this webhook's
messages wait. No message is sent for a user whose token was removed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from dray.views import DeliveryStatus, WebhookFormat
from ray_workers.shared.net_policy import AllowedHosts
from service.config.settings import Settings
from service.config.tokens_file import LOCAL_OWNER, TokensFile
from service.db.models import WebhookRow
from service.db.notifications import WEBHOOKS, Signals
from service.db.repositories import jobs as jobs_repository
from service.db.repositories import webhooks as repository
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.session import measure, touch
from service.domain import meter
from service.domain.webhooks import (
    GIVEN_UP_AFTER,
    MAX_WAITING,
    TEST,
    WITHOUT_TOKEN_FOR,
    Answer,
    body_of,
    headers,
    message_id,
    pause_s,
    why_disabled,
    why_unauthorized,
)
from service.lifecycle.transitions import remark
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings, rest_after

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 32
"""Maximum number of messages that are sent concurrently, each to a different webhook."""
MAX_PER_BATCH = 10
"""Maximum number of messages of a webhook in one turn."""
MAX_BATCH_S = 10.0
"""Seconds after which no further messages are sent in a webhook's turn, so that a slow receiver
can't delay other webhooks."""
KEPT_FOR = timedelta(days=7)
KEPT_OF_A_WEBHOOK = 500
"""Maximum number of settled messages that are kept for each webhook. The newest messages are kept,
for at most `KEPT_FOR`."""
MAX_SWEPT = 5_000
"""Maximum number of old messages that one query returns."""
MAX_ANSWER_CHARS = 1000

Post = Callable[[str, bytes, Mapping[str, str], AllowedHosts], Awaitable[Answer]]


@dataclass(frozen=True)
class _Message:
    """A message to be sent, as read from the database."""

    number: int
    url: str
    body: bytes
    headers: Mapping[str, str]


class WebhookSender:
    """Wakes up when a message is written, and when a message is due."""

    def __init__(
        self,
        database: LoopDatabase,
        signals: Signals,
        settings: Settings,
        timings: LoopTimings,
        *,
        post: Post | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`post` sends a message; tests replace it."""
        self._database = database
        self._signals = signals
        self._public_url = settings.base_url
        self._private_hosts = AllowedHosts(settings.webhook_private_hosts or ())
        tokens_file = settings.tokens_file
        self._tokens = None if tokens_file is None else TokensFile(tokens_file)
        self._unauthorized_since: dict[str, datetime] = {}
        """The time at which the owner of each webhook was first found to have no token."""
        self._has_warned = False
        self._timings = timings
        self._post = post
        self._chance = chance
        self._serving: dict[str, asyncio.Task[None]] = {}
        """The tasks that are sending messages, keyed by webhook."""
        self._last_served: dict[str, float] = {}
        """The time at which each webhook was last served, by the event loop's clock."""
        self._resting: dict[str, float] = {}
        """The time on the event loop's clock until which a webhook pauses after a failure in this
        process. Without this pause, the message would be sent again immediately if the database
        couldn't store the response."""
        self._sweep_at = 0.0
        """The time at which old messages will next be deleted, by the same clock."""

    async def run(self) -> None:
        """Run until cancelled. Messages that are being sent when the loop is cancelled will be sent
        again later."""
        self._sweep_at = asyncio.get_running_loop().time() + self._timings.webhook_sweep_s
        try:
            with self._signals.subscribe(WEBHOOKS) as woken:
                while True:
                    began = asyncio.get_running_loop().time()
                    wait_s = self._timings.webhook_period_s
                    try:
                        wait_s = min(wait_s, await self.run_once())
                    except Exception:
                        logger.exception("a round of the webhook sender failed; the loop continues")
                    await rest_after(began)
                    await woken.wait(wait_s)
        finally:
            for task in self._serving.values():
                task.cancel()
            await asyncio.gather(*self._serving.values(), return_exceptions=True)

    async def run_once(self) -> float:
        """Start to send the due messages of webhooks. Returns the seconds until the next message
        is due."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._sweep_at:
            self._sweep_at = now_s + self._timings.webhook_sweep_s
            await self._sweep()
        unauthorized = await self._unauthorized()
        if unauthorized is None:
            return self._timings.webhook_period_s
        found, now = await self._database.read(lambda s, now: (repository.with_due(s), now))
        ready_at = {
            webhook_id: max(due_at, paused_until or due_at)
            for webhook_id, paused_until, due_at in found
            if due_at is not None and webhook_id not in {*self._serving, *unauthorized}
        }
        self._last_served = {each: at for each, at in self._last_served.items() if each in ready_at}
        self._resting = {each: at for each, at in self._resting.items() if at > now_s}
        ready = [each for each, at in ready_at.items() if at <= now and each not in self._resting]
        ready.sort(key=lambda each: (self._last_served.get(each, 0.0), ready_at[each]))
        for webhook_id in ready[: MAX_AT_ONCE - len(self._serving)]:
            task = asyncio.create_task(self._serve(webhook_id), name=f"webhook {webhook_id}")
            self._serving[webhook_id] = task
            task.add_done_callback(functools.partial(self._served, webhook_id))
        later = [at for at in ready_at.values() if at > now]
        return (min(later) - now).total_seconds() if later else self._timings.webhook_period_s

    async def _unauthorized(self) -> Collection[str] | None:
        """Return the webhooks to which no messages may be sent (`why_unauthorized`); None if the
        tokens file can't be read. A webhook that has been unauthorized for too long is disabled."""
        hooks, now = await self._database.read(lambda s, now: (repository.enabled(s), now))
        if self._tokens is None:
            if not self._has_warned and any(hook.owner != LOCAL_OWNER for hook in hooks):
                self._has_warned = True
                logger.warning(
                    "webhooks stay enabled when their owner's token is removed: DRAY_TOKENS_FILE "
                    "is not set for the process that runs the loops"
                )
            return ()
        try:
            admins = {name: known.is_admin for name, known in self._tokens.tokens().items()}
        except OSError as error:
            logger.error("no webhook message is sent: DRAY_TOKENS_FILE can't be read: %s", error)
            return None
        why = {
            hook.id: why_unauthorized(hook.owner, hook.enabled_by, hook.all_users, admins)
            for hook in hooks
        }
        since = self._unauthorized_since
        self._unauthorized_since = {each: since.get(each, now) for each in why if why[each]}
        for webhook_id, began in self._unauthorized_since.items():
            reason = why[webhook_id]
            if reason is not None and now - began >= WITHOUT_TOKEN_FOR:
                await self._database.write(
                    functools.partial(self._disable_unauthorized, webhook_id, reason)
                )
        return self._unauthorized_since.keys()

    def _disable_unauthorized(
        self, webhook_id: str, reason: tuple[str, str], session: Session, now: datetime
    ) -> None:
        touch(session)
        hook = repository.get(session, webhook_id, lock=True)
        if hook is not None and hook.disabled_at is None:
            self._disable(session, hook, None, *reason, now)

    def _served(self, webhook_id: str, task: asyncio.Task[None]) -> None:
        del self._serving[webhook_id]
        now_s = self._last_served[webhook_id] = asyncio.get_running_loop().time()
        if not task.cancelled() and task.exception() is not None:
            self._resting[webhook_id] = now_s + self._timings.webhook_period_s
            logger.error(
                "the messages of the webhook %s could not be sent",
                webhook_id,
                exc_info=task.exception(),
            )
        self._signals.publish(WEBHOOKS)

    async def _serve(self, webhook_id: str) -> None:
        """Send the webhook's messages one after the other, until its turn ends or a message
        fails."""
        clock = asyncio.get_running_loop().time
        until = clock() + MAX_BATCH_S
        for _ in range(MAX_PER_BATCH):
            message = await self._database.read(
                lambda s, now: self._next_message(s, webhook_id, now)
            )
            if message is None:
                return
            answer = await self._send(message)
            number = message.number
            goes_on = await self._database.write(
                lambda s, now: self._settle(s, webhook_id, number, answer, now)  # noqa: B023
            )
            if not goes_on or clock() >= until:
                return

    async def _send(self, message: _Message) -> Answer:
        if self._post is None:
            # This import is slow, and a service without webhooks doesn't need it.
            from service.webhooks.posting import post

            self._post = post
        return await self._post(message.url, message.body, message.headers, self._private_hosts)

    def _next_message(self, session: Session, webhook_id: str, now: datetime) -> _Message | None:
        hook = repository.get(session, webhook_id)
        if hook is None or hook.disabled_at is not None:
            return None
        row = repository.next_due(session, webhook_id, now)
        if row is None:
            return None
        kind = WebhookFormat(hook.format)
        body = body_of(row.type, row.created_at, row.data, kind, self._public_url)
        proofs = headers(hook.secret, message_id(hook.id, row.number), now, body)
        return _Message(row.number, hook.url, body, proofs)

    def _settle(
        self, session: Session, webhook_id: str, number: int, answer: Answer, now: datetime
    ) -> bool:
        """Store the answer. Returns whether the webhook's next message can be sent immediately."""
        touch(session)
        is_taken = answer.error is None
        measure(session, meter.WEBHOOK_TRIES, label="delivered" if is_taken else "failed")
        hook = repository.get(session, webhook_id, lock=True)
        row = repository.delivery(session, webhook_id, number)
        if hook is None or row is None:
            return False  # the message has been deleted in the meantime
        row.tries += 1
        row.tried_at = now
        row.answer_status, row.answer_error = answer.status, answer.error
        row.answer_body, row.took_s = answer.body[:MAX_ANSWER_CHARS], answer.took_s
        if is_taken:
            row.status, row.next_try_at = DeliveryStatus.DELIVERED.value, None
            hook.failures, hook.failing_since, hook.paused_until = 0, None, None
            return True
        hook.failures += 1
        hook.failing_since = since = hook.failing_since or now
        hook.paused_until = now + timedelta(seconds=pause_s(hook.failures, self._chance()))
        if row.type == TEST or now - row.created_at >= GIVEN_UP_AFTER:
            row.status, row.next_try_at = DeliveryStatus.FAILED.value, None
        elif row.next_try_at is not None:
            row.next_try_at = now + timedelta(seconds=pause_s(row.tries, self._chance()))
        why = why_disabled(since, now, answer)
        if why is not None and hook.disabled_at is None:
            self._disable(session, hook, row.job_id, *why, now)
        elif row.next_try_at is None and not repository.num_waiting(session, [hook.id]):
            # Reset the failure state now, because the next message might be sent days later, and
            # its failure must not be counted together with the current failures.
            hook.failures, hook.failing_since, hook.paused_until = 0, None, None
        return False

    def _disable(
        self,
        session: Session,
        hook: WebhookRow,
        job_id: str | None,
        code: str,
        message: str,
        now: datetime,
    ) -> None:
        """Disable the webhook, and add an event to the job whose delivery failed."""
        hook.disabled_at, hook.disabled_code, hook.disabled_message = now, code, message
        dropped = repository.drop_waiting(session, hook.id)
        logger.warning("the webhook %s of %s is disabled: %s", hook.id, hook.owner, message)
        job = None if job_id is None else jobs_repository.lock(session, job_id)
        if job is not None and job.deleted_at is None:
            remark(
                session,
                job,
                type_="webhook",
                code="webhook_disabled",
                message=f"the webhook {hook.id} of {hook.owner} is disabled: {message}",
                now=now,
                data={"webhook": hook.id, "why": code, "dropped": dropped},
            )

    async def _sweep(self) -> None:
        """Delete old messages, and disable webhooks for which too many messages are waiting."""

        def work(session: Session, now: datetime) -> None:
            touch(session)
            for webhook_id in repository.overfull(session, MAX_WAITING):
                hook = repository.get(session, webhook_id, lock=True)
                if hook is not None and hook.disabled_at is None:
                    why = f"more than {MAX_WAITING:,} messages are waiting for the receiver"
                    self._disable(session, hook, None, "too_slow", why, now)

        await self._database.write(work)
        while numbers := await self._database.read(
            lambda s, now: repository.surplus(s, now - KEPT_FOR, KEPT_OF_A_WEBHOOK, MAX_SWEPT)
        ):
            for some in in_chunks(numbers, CHUNK):
                await self._database.write(functools.partial(_delete, numbers=some))


def _delete(session: Session, _: datetime, *, numbers: Sequence[int]) -> None:
    touch(session)
    repository.delete_deliveries(session, numbers)
