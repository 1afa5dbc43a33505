"""The servers of the cases: one without tokens, and one whose users have tokens."""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import typer.main

import dray
from dray.cli.app import run
from tests.unit.api.serving import LiveServer, serving

ADMIN = "an-admin"
RECEIVER = "127.0.0.1"


class Caller:
    """A user of a server, through HTTP, the SDK and the command."""

    def __init__(self, server: LiveServer, token: str | None) -> None:
        self.url = server.url
        self.token = token
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.http = server.client(headers=headers)
        self.sdk = dray.Client(server.url, token=token)

    def command(self, *words: str) -> tuple[int, str, str]:
        """Run `dray` in this process; returns (exit code, output, errors)."""
        out, err = io.StringIO(), io.StringIO()
        variables = {} if self.token is None else {"DRAY_TOKEN": self.token}
        with ExitStack() as stack:
            stack.enter_context(mock.patch("typer.main.get_command", _get_command))
            stack.enter_context(mock.patch.dict(os.environ, variables))
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            code = run(["--url", self.url, *words])
        assert "Traceback" not in err.getvalue(), err.getvalue()
        return code, out.getvalue(), err.getvalue()

    def get(self, path: str, **params: Any) -> Any:
        answer = self.http.get(path, params=params)
        assert answer.status_code == 200, (path, params, answer.text)
        return answer.json()

    def close(self) -> None:
        self.http.close()
        self.sdk.close()


_get_command = functools.cache(typer.main.get_command)
"""The tree of commands, cached because building it takes far longer than running one."""


class Site:
    """A server, an admin, and one other user at a time."""

    def __init__(self, server: LiveServer, tokens: Path | None) -> None:
        self.server = server
        self._tokens = tokens
        if tokens is not None:
            tokens.write_text(_line(ADMIN, is_admin=True))
        self.admin = Caller(server, None if tokens is None else ADMIN)
        body = {"recipe": "image_classification", "name": "other"}
        answer = self.admin.http.post("/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        self.other: str = answer.json()["id"]
        """Return a job to compare with."""
        hook = {"url": "https://93.184.216.34/hook", "all_users": True}
        answer = self.admin.http.post("/v1/webhooks", json=hook)
        assert answer.status_code == 201, answer.text
        self.hook: str = answer.json()["id"]
        """Return a webhook that is notified of all jobs that end."""

    @contextmanager
    def caller(self, user: str | None) -> Iterator[Caller | None]:
        """Return the user once there is a token with this name; None if the name is invalid."""
        token = None
        if user is not None:
            assert self._tokens is not None
            token = hashlib.sha256(user.encode()).hexdigest()[:40]
            lines = _line(ADMIN, is_admin=True) + _line(user, token)
            self._tokens.write_text(lines, encoding="utf-8")
        caller = Caller(self.server, token)
        try:
            yield caller if caller.http.get("/v1/jobs").status_code != 401 else None
        finally:
            caller.close()


def _line(name: str, token: str = ADMIN, *, is_admin: bool = False) -> str:
    return f"{name}:{hashlib.sha256(token.encode()).hexdigest()}{':admin' * is_admin}\n"


class Sites:
    """Both servers, and a receiver of messages."""

    def __init__(self, without_tokens: Site, with_tokens: Site, receiver: Receiver) -> None:
        self._sites = (without_tokens, with_tokens)
        self.receiver = receiver

    def of(self, user: str | None) -> Site:
        return self._sites[user is not None]


class Receiver:
    """Records the requests to the addresses of webhooks."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                receiver.targets.append(self.requestline.split()[1])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((RECEIVER, 0), Handler)
        self.url = f"http://{RECEIVER}:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[Sites]:
    settings = {"webhook_private_hosts": [RECEIVER], **settings}
    tokens = folder / "tokens"
    tokens.write_text(_line(ADMIN, is_admin=True))
    receiver = Receiver()
    try:
        with (
            serving(folder / "open", **settings) as without,
            serving(folder / "closed", tokens_file=tokens, **settings) as guarded,
        ):
            yield Sites(Site(without, None), Site(guarded, tokens), receiver)
    finally:
        receiver.close()
