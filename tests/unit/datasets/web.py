"""A web server for tests, which misbehaves on request."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    announced: int | None = None
    """Content-Length, if it differs from the body's; -1 announces none."""


@dataclass
class Web:
    port: int
    answers: dict[str, Answer | Callable[[int], Answer]] = field(default_factory=dict)
    """Answers by path; a function receives the number of earlier requests."""
    asked: list[tuple[str, Message]] = field(default_factory=list)
    scheme: str = "http"

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def count(self, path: str) -> int:
        return sum(one == path for one, _ in self.asked)


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = web.answers.get(self.path, Answer(status=404))
            if callable(answer):
                answer = answer(web.count(self.path))
            web.asked.append((self.path, self.headers))
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            length = len(answer.body) if answer.announced is None else answer.announced
            if length >= 0:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web = Web(server.server_port)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        web.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
