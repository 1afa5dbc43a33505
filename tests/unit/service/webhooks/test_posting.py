"""A delivery attempt ends soon and uses little memory regardless of what the receiver does, and
connects only to allowed addresses."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from ray_workers.shared.net_policy import AllowedHosts
from service.domain.webhooks import Answer
from service.webhooks import posting

HERE = AllowedHosts(["127.0.0.1"])
Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def receiver(behaviour: Behaviour) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield its URL, and the headers of the received requests. `behaviour` runs after each of
    them."""
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await behaviour(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has disconnected
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/hook?x=1", heads
    finally:
        server.close()


def answers(text: str) -> Behaviour:
    async def behaviour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text.replace("\n", "\r\n").encode())
        await writer.drain()

    return behaviour


async def hangs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.get_running_loop().create_future()


async def drips(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends headers that never end."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def floods(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n")
    while True:
        writer.write(b"x" * (1 << 20))
        await writer.drain()


async def informs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends only interim responses."""
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        await writer.drain()


async def stalls(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Responds, but never sends the rest of its body."""
    writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\n\r\nthanks")
    await hangs(_, writer)


@pytest.mark.parametrize("path", ["/a/../b", "//.", "/%41%7e", "/?x=%zz", "/[a]"])
async def test_the_path_is_asked_for_as_it_is_written(path: str) -> None:
    async with receiver(answers("HTTP/1.1 204 No Content\n\n")) as (url, heads):
        await posting.post(url.replace("/hook?x=1", path), b"{}", {}, HERE)
    assert heads[0].startswith(f"POST {path} HTTP/1.1\r\n".encode())


async def sent_to(behaviour: Behaviour) -> tuple[Answer, list[bytes]]:
    async with receiver(behaviour) as (url, heads):
        return await posting.post(url, b"{}", {"webhook-id": "1"}, HERE), heads


async def test_a_message_is_posted_as_json_with_its_headers() -> None:
    answer, (head,) = await sent_to(answers("HTTP/1.1 204 No Content\n\n"))
    assert (answer.status, answer.body, answer.error) == (204, "", None)
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /hook?x=1 HTTP/1.1"
    assert {"webhook-id: 1", "Content-Type: application/json", "Content-Length: 2"} <= set(lines)
    assert any(line.startswith("User-Agent: dray/") for line in lines)


@pytest.mark.parametrize(
    ("behaviour", "status", "error"),
    [
        (answers("HTTP/1.1 500 No\nContent-Length: 2\n\nno"), 500, "the receiver answered 500"),
        (answers("HTTP/1.1 410 Gone\nContent-Length: 2\n\nno"), 410, "the receiver answered 410"),
        (
            answers("HTTP/1.1 307 There\nLocation: /again\nContent-Length: 2\n\nno"),
            307,
            "the receiver answered 307: redirects are not followed",
        ),
        (answers(""), None, "the connection was closed before a response arrived"),
        (answers("garbage\n\n"), None, "the request failed (ClientResponseError)"),
        (hangs, None, "no response within 0.3 s"),
        (drips, None, "no response within 0.3 s"),
        (answers(f"HTTP/1.1 200 OK\nx: {'y' * 100_000}\n\n"), None, "the request failed"),
    ],
    ids=["500", "410", "redirect", "nothing", "garbage", "hangs", "drips", "long head"],
)
async def test_whatever_a_receiver_does_ends_soon_and_is_reported(
    behaviour: Behaviour, status: int | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "LIMIT_S", 0.3)
    answer, heads = await sent_to(behaviour)
    assert answer.status == status
    assert answer.error is not None
    assert answer.error.startswith(error)
    assert len(heads) == 1


async def test_of_gigabytes_the_beginning_is_read() -> None:
    tracemalloc.start()
    try:
        answer, _ = await sent_to(floods)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (answer.status, answer.error) == (200, None)
    assert answer.body == "x" * posting.MAX_BODY_BYTES
    assert peak < 16 << 20, "with the server's own buffers, which this process has too"


async def test_a_receiver_that_never_comes_to_its_answer_is_left_after_some_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(posting._BoundedSocket, "_left", 10_000)
    answer, _ = await sent_to(informs)
    assert answer.error == "the connection was closed before a response arrived"


async def test_a_body_that_does_not_come_changes_nothing_about_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(posting, "BODY_LIMIT_S", 0.1)
    answer, _ = await sent_to(stalls)
    assert (answer.status, answer.body, answer.error) == (202, "thanks", None)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "2130706433", "169.254.169.254", "[::ffff:127.0.0.1]"],
)
async def test_private_addresses_are_not_connected_to(host: str) -> None:
    async with receiver(hangs) as (url, heads):
        aimed = url.replace("127.0.0.1", host)
        answer = await posting.post(aimed, b"{}", {}, AllowedHosts())
    assert answer.error is not None
    assert "is not allowed" in answer.error
    assert heads == []


async def test_the_address_is_checked_that_the_name_has_when_the_connection_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up: list[str] = []

    def rebound(host: str, port: int, *_: object) -> list[object]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    async with receiver(answers("HTTP/1.1 200 OK\n\n")) as (url, heads):
        aimed = url.replace("127.0.0.1", "hooks.example.org")
        refused = await posting.post(aimed, b"{}", {}, AllowedHosts())
        assert refused.error is not None
        assert refused.error.startswith(
            "connecting to hooks.example.org is not allowed: 127.0.0.1 is"
        )
        assert heads == []
        allowed = AllowedHosts(["hooks.example.org"])
        assert (await posting.post(aimed, b"{}", {}, allowed)).status == 200
    assert looked_up == ["hooks.example.org"] * 2


async def test_a_host_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    answer = await posting.post("https://hooks.example.org/", b"{}", {}, AllowedHosts())
    assert answer.error == "its host has no address"
