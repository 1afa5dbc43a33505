"""Sends sequential requests over persistent connections, and measures how long each takes.

A minimal client over raw sockets. On a small machine, measurements of a more complex client would
reflect the client instead of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.machine import BenchmarkError


@dataclass(frozen=True)
class Load:
    """The times of several requests, in seconds."""

    wall_s: float
    latencies_s: Sequence[float]

    @property
    def per_request_s(self) -> float:
        """Seconds of the server per request, with every connection always busy."""
        return self.wall_s / len(self.latencies_s)


def get(path: str, port: int) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()


def post(path: str, port: int, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(
    port: int, request: Callable[[], bytes], *, num_requests: int, num_connections: int = 1
) -> Load:
    """Send `num_requests` over all connections in total. Raises BenchmarkError if one is not
    successful."""
    latencies: list[float] = []
    left = num_requests

    async def connection() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while left > 0:
                left -= 1
                began = time.perf_counter()
                await exchange(reader, writer, request())
                latencies.append(time.perf_counter() - began)
        finally:
            writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(num_connections)))
    return Load(time.perf_counter() - began, latencies)


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> bytes:
    """Send one request and return the body of the response. Raises BenchmarkError if it is not
    successful."""
    writer.write(request)
    head, body = await read_answer(reader)
    if not head.startswith(b"HTTP/1.1 2"):
        raise BenchmarkError(f"the server answered {head.splitlines()[0].decode()}")
    return body


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read the head and the body of one response, which has a length, is chunked, or has status
    304."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b" 304 " in lower.splitlines()[0]:
        return head, b""
    if b"content-length:" in lower:
        length = int(lower.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return head, await reader.readexactly(length)
    body = b""
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return head, body
