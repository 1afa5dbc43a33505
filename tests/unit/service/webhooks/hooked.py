"""A service with webhooks, their sender, and a receiver that responds as specified by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from dray import views
from dray.requests import WebhookRequest
from ray_workers.shared.net_policy import AllowedHosts
from service.db.models import WebhookDeliveryRow
from service.db.session import Database
from service.domain.webhooks import Answer
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.loops.webhook_sender import WebhookSender
from service.storage.storage import Storage
from service.webhooks.service import Webhooks
from tests.unit.service.helpers import Service

TAKEN = Answer(200, "ok", None, 0.01)
BUSY = Answer(503, "busy", "the receiver answered 503", 0.01)
GONE = Answer(410, "", "the receiver answered 410", 0.01)


def set_tokens(path: Path, *names: str) -> None:
    """Write the tokens file; a name can end with `:admin`."""
    parts = (name.partition(":admin") for name in names)
    path.write_text("".join(f"{name}:{'0' * 64}{admin}\n" for name, admin, _ in parts))


@dataclass(frozen=True)
class Sent:
    url: str
    body: bytes
    headers: Mapping[str, str]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["data"]
        return found


class Hooked(Service):
    """A service whose receivers accept everything, except for receivers in `answers`."""

    def __init__(self, database: Database, storage: Storage, home: Path, **settings: Any) -> None:
        super().__init__(database, storage, home, webhook_private_hosts=["127.0.0.1"], **settings)
        self.webhooks = Webhooks(database, self.settings, clock=lambda: self.now)
        self.answers: dict[str, Answer | Callable[[], Awaitable[Answer]]] = {}
        """Responses of receivers, by URL."""
        self.sent: list[Sent] = []
        self.sender = self.new_sender()

    def new_sender(self) -> WebhookSender:
        return WebhookSender(
            LoopDatabase(self.database),
            self.database.signals,
            self.settings,
            LoopTimings(),
            post=self._post,
            chance=lambda: 0.0,
        )

    async def _post(
        self, url: str, body: bytes, headers: Mapping[str, str], _: AllowedHosts
    ) -> Answer:
        self.sent.append(Sent(url, body, headers))
        answer = self.answers.get(url, TAKEN)
        return answer if isinstance(answer, Answer) else await answer()

    async def hook(self, name: str = "a", *, owner: str = "ann", **fields: Any) -> views.Webhook:
        wanted = WebhookRequest.model_validate({"url": f"http://127.0.0.1/{name}", **fields})
        return await self.webhooks.create(wanted, owner=owner)

    async def round(self, sender: WebhookSender | None = None) -> float:
        """Run one round of the sender, and everything that it starts."""
        sender = sender or self.sender
        next_s = await sender.run_once()
        await asyncio.gather(*sender._serving.values())
        await asyncio.sleep(0)  # callbacks of completed tasks
        return next_s

    async def delivery(self, hook: views.Webhook) -> views.WebhookDelivery:
        """Return the only delivery of the webhook."""
        (found,) = (await self.webhooks.deliveries(hook.id, owner=None)).items
        return found

    def written(self) -> list[tuple[str, str | None]]:
        """Return the type and job of each message, in the order in which they were written."""
        query = select(WebhookDeliveryRow).order_by(WebhookDeliveryRow.number)
        rows = self.database.read_sync(lambda s: s.scalars(query).all())
        return [(row.type, row.job_id) for row in rows]
