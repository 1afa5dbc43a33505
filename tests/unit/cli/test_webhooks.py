"""Webhooks on the command line and in both clients, together with docs/guides/webhooks.md: its
commands are run, and its receiver verifies the messages that are sent to it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dray import AsyncClient, Client, errors
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.loops.webhook_sender import WebhookSender
from tests.integration.tour import blocks_of, run_tour
from tests.marks import SOAK
from tests.unit.api.serving import LiveServer, serving, wait_until
from tests.unit.cli.running import Cli

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "webhooks.md").read_text()
Verify = Callable[[str, dict[str, str], bytes], bool]


class Receiver:
    """Stores what is posted to it. For some paths, it answers 503."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.got.append((headers, body))
                self.send_response(503 if self.path == "/busy" else 200)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"done")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    serve = receiver.server.serve_forever
    thread = threading.Thread(target=serve, kwargs={"poll_interval": 0.01})
    thread.start()
    yield receiver
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that runs the loop for sending."""
    home = tmp_path_factory.mktemp("webhooks")
    with serving(home, webhook_private_hosts=["127.0.0.1"]) as server:
        runtime = server.context.runtime
        sender = WebhookSender(
            LoopDatabase(runtime.database), runtime.signals, runtime.settings, LoopTimings()
        )
        sending = asyncio.run_coroutine_threadsafe(sender.run(), server._loop)
        yield server
        sending.cancel()
        wait_until(sending.done, "the sender's end")


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def verify() -> Verify:
    """The function from the page."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    found: Verify = names["verify"]
    return found


def test_the_receiver_of_the_page_takes_what_is_sent_and_nothing_else(
    client: Client, server: LiveServer, receiver: Receiver, verify: Verify
) -> None:
    hook = client.create_webhook(receiver.url, states=["CANCELLED"])
    assert hook.secret is not None
    already = len(receiver.got)
    client.cancel(server.submit())
    wait_until(lambda: len(receiver.got) > already, "the message")
    headers, body = receiver.got[-1]
    assert verify(hook.secret, headers, body)
    assert not verify(hook.secret, headers, body + b" ")
    assert not verify("whsec_AAAA", headers, body)
    assert not verify(hook.secret, {**headers, "webhook-id": "other"}, body)
    old = {**headers, "webhook-timestamp": str(int(headers["webhook-timestamp"]) - 600)}
    assert not verify(hook.secret, old, body)
    client.delete_webhook(hook.id)


@SOAK
def test_every_command_of_the_page_does_what_it_says(
    server: LiveServer, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_URL", receiver.url)
    added, tried, _ = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=200)
    assert re.search(r"^secret +whsec_", added, flags=re.MULTILINE)
    assert "FAILED with team=vision" in added
    assert "delivered: 200: done" in tried
    assert "disabled: a user disabled it" in tried
    assert tried.endswith("deleted\n")


def test_the_json_of_the_page_is_what_is_sent(
    client: Client, server: LiveServer, receiver: Receiver
) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    shown = json.loads(block)
    hook = client.create_webhook(receiver.url)
    already = len(receiver.got)
    client.cancel(server.submit())
    wait_until(lambda: len(receiver.got) > already, "the message")
    sent = json.loads(receiver.got[-1][1])
    assert sent.keys() == shown.keys()
    assert sent["data"].keys() == shown["data"].keys()
    client.delete_webhook(hook.id)


def test_commands_print_what_they_did_and_say_what_is_wrong(
    server: LiveServer, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(server.url, capsys)
    busy = f"{receiver.url}/busy"
    hook = cli.json("webhook", "add", busy, "--slack", "--queue", "default", "--all-users")
    assert (hook["format"], hook["queue"], hook["all_users"]) == ("slack", "default", True)
    shown = cli("webhook", "show", hook["id"])
    assert "filter    SUCCEEDED, FAILED, CANCELLED in default\n" in shown
    assert "secret" not in shown
    tried = cli("webhook", "test", hook["id"], exits=1)
    assert tried.endswith("failed: the receiver answered 503: done\n")
    assert cli.json("webhook", "deliveries", hook["id"])[0]["status"] == "failed"
    (line,) = [one for one in cli("webhook", "ls").splitlines() if hook["id"] in one]
    assert "  enabled  " in line
    assert "failing since" not in line  # no message is waiting to be sent
    cli("webhook", "add", "https://10.0.0.1/", exits=3)
    assert "10.0.0.1 is a private address (at /url)" in cli.err
    cli("webhook", "add", busy, "--state", "done", exits=2)
    assert "DONE is not one of QUEUED" in cli.err
    cli("webhook", "delete", hook["id"])
    cli("webhook", "show", hook["id"], exits=3)
    assert f"there is no webhook {hook['id']}" in cli.err


async def _by_the_asynchronous_client(url: str, receiver: str) -> None:
    async with AsyncClient(url) as client:
        hook = await client.create_webhook(receiver, labels={"a": "b"}, format="slack")
        assert await client.webhook(hook.id) == hook.model_copy(update={"secret": None})
        assert (await client.test_webhook(hook.id)).status == "delivered"
        assert (await client.test_webhook(hook.id, wait=False)).status == "waiting"
        types = [each.type async for each in client.webhook_deliveries(hook.id)]
        assert types == ["webhook.test"] * 2
        assert not (await client.disable_webhook(hook.id)).enabled
        with pytest.raises(errors.WebhookDisabled):
            await client.test_webhook(hook.id)
        assert (await client.enable_webhook(hook.id)).enabled
        assert hook.id in [each.id for each in await client.webhooks()]
        await client.delete_webhook(hook.id)
        with pytest.raises(errors.WebhookNotFound):
            await client.webhook(hook.id)


def test_the_asynchronous_client_does_the_same(server: LiveServer, receiver: Receiver) -> None:
    asyncio.run(_by_the_asynchronous_client(server.url, receiver.url))
