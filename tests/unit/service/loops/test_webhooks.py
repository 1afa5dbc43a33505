"""A complete service notifies a receiver about its jobs over a real connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from dray.requests import WebhookRequest
from dray.views import JobState
from service.webhooks.service import Webhooks
from tests.unit.service.loops.world import World, comes_to, eventually


async def test_a_receiver_is_told_once_what_became_of_each_job(world: World) -> None:
    told: list[dict[str, Any]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        told.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    runtime = await world.open(webhook_private_hosts=["127.0.0.1"], public_url="https://dray.x/")
    wanted = WebhookRequest.model_validate({"url": url, "states": ["FAILED", "SUCCEEDED"]})
    webhooks = Webhooks(runtime.database, runtime.settings)
    hook = await webhooks.create(wanted, owner="default")
    good = await world.submit(runtime)
    bad = await world.submit(runtime, "fails", max_retries=0)
    await comes_to(runtime, good, JobState.SUCCEEDED)
    await comes_to(runtime, bad, JobState.FAILED)

    async def nothing_waits() -> bool:
        return (await webhooks.get(hook.id, owner=None)).num_waiting == 0

    await eventually(nothing_waits, "messages still wait")
    data = {each["data"]["id"]: each["data"] for each in told}
    assert len(told) == 2
    assert (data[good]["state"], data[bad]["state"]) == ("SUCCEEDED", "FAILED")
    assert data[good]["metrics"] == {"train/loss": 0.2}
    assert data[good]["link"] == f"https://dray.x/#/jobs/{good}"
    assert "the sky is red" in data[bad]["reason"]["message"]
    cells = (await runtime.metering.watched()).cells
    assert cells["dray_webhook_tries", "delivered", "count"] == 2
    server.close()
