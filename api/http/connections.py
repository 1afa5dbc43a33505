"""Limits on connections: uvicorn's HTTP protocol with bounds on times, headers and connections.

With httptools, uvicorn bounds neither the size of headers nor the time that a caller takes to send
them, and its `limit_concurrency` also counts idle connections. This module closes a connection if
the caller does not send a request in time, or closes it earlier to make space for another
connection."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import ClassVar
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from api.http.limits import SPARE, Limits
from api.problems import MEDIA_TYPE, RETRY_AFTER_S, STATUS, title
from ray_workers.shared.peers import peer_credentials

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
"""Number of connections that asyncio accepts per loop iteration before it reads from any."""
SLICE_BYTES = 16 << 10
MAX_PIPELINED = 16
BYTES_PER_S = 1 << 20
"""A body gets a second more for each of these bytes, so that large files can be uploaded. A body
that is larger than its route allows is refused as soon as its head has arrived."""
MAX_ANNOUNCED = 1 << 30


class Connections:
    """The open connections of one server, grouped by client."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: dict[BoundedProtocol, str] = {}
        self._of_client: Counter[str] = Counter()
        self._waiting: dict[str, dict[BoundedProtocol, None]] = {}
        """Connections without a request in progress, grouped by client, longest wait first."""

    def add(self, connection: BoundedProtocol, client: str) -> None:
        """Count a new connection, which has no request in progress."""
        self._open[connection] = client
        self._of_client[client] += 1
        self.wait(connection)

    def evict_surplus(self, client: str) -> None:
        """Close a waiting connection if a new connection of `client` exceeds a limit.

        If `client` exceeds its own limit, closes its longest-waiting connection. If only the limit
        on all connections is exceeded, closes the longest-waiting connection of the client that has
        the most waiting connections, to protect clients that have fewer.
        """
        crowded = self.limits.per_client + SPARE
        if self._of_client[client] > crowded:
            self._evict(client)
        elif len(self._open) > self.limits.connections + SPARE and self._waiting:
            self._evict(max(self._waiting, key=lambda one: len(self._waiting[one])))

    def wait(self, connection: BoundedProtocol) -> None:
        """Mark a connection as having no request in progress, so that it may be closed."""
        if (client := self._open.get(connection)) is not None:
            self._waiting.setdefault(client, {})[connection] = None

    def work(self, connection: BoundedProtocol) -> None:
        """Mark a connection as having a request in progress, so that it stays open."""
        client = self._open.get(connection, "")
        if waiting := self._waiting.get(client):
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[client]

    def remove(self, connection: BoundedProtocol) -> None:
        self.work(connection)
        client = self._open.pop(connection, None)
        if client is None:
            return
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]

    def _evict(self, client: str) -> None:
        if waiting := self._waiting.get(client):
            oldest = next(iter(waiting))
            self.remove(oldest)
            oldest.give_way()


class Awaited(Enum):
    """Parts of a request that a connection can be waiting for."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `config` creates a subclass that counts its connections in `shared`."""

    shared: ClassVar[Connections]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits = self.shared.limits
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._refused = False
        self._begun = False
        """Whether part of a request has arrived."""
        self._num_unused = 0
        """Number of bytes received since the last complete head or piece of a body."""
        self._body_within_s = self._limits.body_within_s
        """Maximum time in seconds for the body of the current request to arrive."""
        self._num_head = 0
        """Number of bytes in the target and headers of the current request."""
        self._is_of_own_user: bool | None = None
        self._await(Awaited.HEAD, self._limits.head_within_s)
        client = self.client[0] if self.client else ""
        self.shared.add(self, client)
        # Wait until every connection accepted in this iteration of the event loop has been read
        # once: closing a connection with unread bytes would send a TCP reset instead of the 503
        # response.
        self.loop.call_soon(self.loop.call_soon, self.shared.evict_surplus, client)

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.remove(self)
        for timer in (self._timer, self._sending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self._awaited is Awaited.HEAD:
            self._await(Awaited.HEAD, self._limits.head_within_s)
        # Parse the data in slices, so that the bytes of one request aren't counted toward another.
        # The count is exact for parsed bytes, and off by at most one slice for unparsed bytes.
        for start in range(0, len(data), SLICE_BYTES):
            if self._refused or self.transport.is_closing():
                return
            piece = data[start : start + SLICE_BYTES]
            self._num_unused += len(piece)
            super().data_received(piece)
            if self._num_unused > self._limits.head_bytes:
                self._refuse_large_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["is_of_own_user"] = self.is_of_own_user
        self.scope["state"]["begin_body"] = self.begin_body
        self._begun = True
        self._num_head = 0
        if self._awaited is Awaited.NOTHING:  # a pipelined request
            self._await(Awaited.HEAD, self._limits.head_within_s)

    def is_of_own_user(self) -> bool:
        """Whether a process of this user or of root on this machine has opened the connection."""
        if self._is_of_own_user is None:
            connection = self.transport.get_extra_info("socket")
            self._is_of_own_user = peer_credentials.is_own_peer(connection, or_roots=True)
        return self._is_of_own_user

    def begin_body(self) -> None:
        """Count the time for the body from now, because the server begins to read it. Before, the
        request may have waited for other requests."""
        if self._awaited is Awaited.BODY and not self._refused:
            self._await(Awaited.BODY, self._body_within_s)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaited is Awaited.BODY:
            return  # a trailer must not become a header
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head += num_bytes
        limits = self._limits
        if self._num_head > limits.head_bytes or len(self.headers) >= limits.num_headers:
            self._refuse_large_head()
            raise ValueError("too large a head")  # ends the parsing

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests at once")
        if detail := _ambiguous_host(self.url, self.headers):
            self._refuse("malformed_request", detail)
            raise ValueError(detail)  # ends the parsing
        super().on_headers_complete()
        self._num_unused = 0
        self._body_within_s = self._limits.body_within_s + _announced(self.headers) / BYTES_PER_S
        self._await(Awaited.BODY, self._body_within_s)
        self.shared.work(self)

    def on_body(self, body: bytes) -> None:
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_unused = 0
        self._begun = False
        self._await(Awaited.NOTHING)
        if self.cycle.response_complete:  # answered before the body was complete
            self._await(Awaited.HEAD, self._limits.keep_alive_s)
            self.shared.wait(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._call(self._limits.send_within_s, self.transport.abort)
        elif self._awaited is Awaited.BODY:  # the request was answered without its body
            self._await(Awaited.BODY, self._limits.linger_s)
        elif self.cycle.response_complete:  # all earlier requests have been answered too
            if self._awaited is Awaited.NOTHING:
                self._await(Awaited.HEAD)
            self.shared.wait(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self._call(self._limits.send_within_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed_request", "the request is not valid HTTP/1.1")

    def give_way(self) -> None:
        """Close this connection, to make space for another connection."""
        if self._begun and not self._refused:
            detail = (
                "too many connections are open, and this connection was slow to send its request"
            )
            self.transport.write(_answer("unavailable", detail))
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the caller is not reading its response
        else:
            self._close()

    def _await(self, awaited: Awaited, within_s: float | None = None) -> None:
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if within_s is None else self._call(within_s, self._time_is_up)

    def _time_is_up(self) -> None:
        answered = self._awaited is Awaited.BODY and self.cycle.response_complete
        if self.flow.read_paused:  # the server stopped reading: the caller may have sent everything
            self._await(self._awaited, self._limits.linger_s)
        elif self._begun and not answered:
            self._refuse_slow()
        else:
            self._close()

    def _refuse_slow(self) -> None:
        part = "headers" if self._awaited is Awaited.HEAD else "body"
        limits = self._limits
        within_s = limits.head_within_s if part == "headers" else self._body_within_s
        self._refuse("request_too_slow", f"the {part} did not arrive within {within_s:g} s")

    def _refuse_large_head(self) -> None:
        limits = self._limits
        self._refuse(
            "headers_too_large",
            f"at most {limits.num_headers} headers, totaling at most {limits.head_bytes} bytes, "
            "are allowed",
        )

    def _refuse(self, code: str, detail: str) -> None:
        """Refuse a request before it reaches the application, and keep reading for `linger_s`."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        host = self.client[0] if self.client else "-"
        logger.info("%d to %s: %s", STATUS[code], host, detail)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline:
                self.transport.abort()  # the caller would read this answer as part of another one
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._await(Awaited.NOTHING)
        self.shared.wait(self)
        self.transport.write(_answer(code, detail))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._call(self._limits.linger_s, self.transport.abort)

    def _close(self) -> None:
        self.transport.close()
        self._call(self._limits.linger_s, self.transport.abort)  # if it is never read

    def _call(self, delay_s: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, what)


def _announced(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the size of a body in bytes, at most MAX_ANNOUNCED; 0 if it is unknown."""
    given = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    return min(int(given), MAX_ANNOUNCED) if given.isdigit() and len(given) < 20 else 0


def _ambiguous_host(target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return why the host of a request is ambiguous (RFC 9112, 3.2), or None if it is not.

    A proxy and the server, or two parts of the server, could interpret an ambiguous host
    differently.
    """
    hosts = [value.strip().lower() for name, value in headers if name.lower() == b"host"]
    if len(hosts) > 1:
        return "the request has several Host headers"
    if b"://" in target.partition(b"?")[0]:  # in absolute form
        netloc = urlsplit(target.lower()).netloc
        if netloc and hosts and netloc != hosts[0]:
            return "the URL of the request and its Host header name different hosts"
    return None


def _answer(code: str, detail: str) -> bytes:
    """Return a complete response with `Connection: close`."""
    status = STATUS[code]
    body = {
        "type": f"urn:dray:problem:{code}",
        "title": title(status),
        "status": status,
        "detail": detail,
        "code": code,
    }
    content = json.dumps(body).encode()
    lines = [
        f"content-type: {MEDIA_TYPE}",
        f"content-length: {len(content)}",
        "cache-control: no-store",
        "connection: close",
    ]
    lines += [f"retry-after: {RETRY_AFTER_S}"] if status == 503 else []
    return STATUS_LINE[status] + "\r\n".join([*lines, "", ""]).encode() + content


_LOGGED_ELSEWHERE = (
    "Invalid HTTP request received",
    "Unsupported upgrade request",
    "No supported WebSocket library",
)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn's log is worth logging. Refused requests, and rejected upgrades
    to other protocols, are already logged elsewhere."""
    return not str(record.msg).startswith(_LOGGED_ELSEWHERE)


def config(
    app: ASGIApp, limits: Limits, *, stop_within_s: int, proxies: Sequence[str] = ()
) -> uvicorn.Config:
    """Return uvicorn's configuration to serve `app` within `limits`.

    proxies: addresses or networks of the proxies whose forwarding headers are trusted. By default,
    uvicorn would trust every process on this machine.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    protocol = type("Connection", (BoundedProtocol,), {"shared": Connections(limits)})
    return uvicorn.Config(
        app,
        port=0,
        http=protocol,
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=stop_within_s,
    )
