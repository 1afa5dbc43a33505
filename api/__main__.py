"""`python -m api`: the server. In embedded mode, the server also runs the service's loops."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.http import connections
from api.http.limits import Limits, raise_descriptor_limit
from dray.home_token import is_loopback
from service.cluster.port import ClusterUnavailable
from service.config import logging_setup, tokens_file
from service.config.home_lock import write_privately
from service.config.settings import Settings, read_settings
from service.config.start_refusals import StartRefused
from service.config.tokens_file import load_tokens
from service.db.notifications import QUEUE
from service.domain.errors import DomainError
from service.runtime import Runtime, tune_interpreter

BACKLOG = 1024
"""Maximum number of connections that the operating system queues until they are accepted."""
STOP_WITHIN_S = 5
"""Time in seconds that running downloads have to finish after the server is asked to stop. Long
polls end immediately."""


class CannotStart(StartRefused):
    """The server can't start, or must not be started. The message states what to do."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which `serve` replaces."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            # Increase the backlog, which asyncio has set to the number of connections that it
            # accepts at once.
            bound.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_exposure(settings: Settings) -> None:
    """Raise CannotStart if other machines can reach the address but there are no tokens.

    Without tokens, any caller could run arbitrary code on the cluster by submitting a job.
    """
    if settings.tokens_file is None and not is_loopback(settings.host):
        raise CannotStart(
            f"DRAY_HOST is {settings.host}, which other machines can reach, but "
            "there are no tokens: set "
            "DRAY_TOKENS_FILE to a file with a line name:sha256-of-the-token for each caller "
            "(printf %s TOKEN | sha256sum), or leave DRAY_HOST at 127.0.0.1"
        )
    if settings.tokens_file is not None:
        load_tokens(settings.tokens_file)  # reports errors in the file before Ray is started


def bind(settings: Settings) -> socket.socket:
    """Bind the port, so that a port in use is reported before anything is started. Connections are
    accepted only once the server calls `listen`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise CannotStart(
            f"can't listen on {settings.host} port {settings.port} ({error.strerror}): is another "
            "server running there? Stop it, or set DRAY_PORT"
        ) from None
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def sign_in_link(settings: Settings, address: str) -> str | None:
    """Return the link that signs a browser in with the token in the server's home.

    The first start of the server writes this token. Returns None if the server doesn't accept the
    token. Raises HomeTokenUnusable.
    """
    if settings.tokens_file is not None or settings.open_to_local_users:
        return None
    # Browsers do not send the part after `#` to a server.
    return f"{settings.public_url or address}/#token={tokens_file.ensure(settings.home)}"


async def serve(settings: Settings, *, loops: bool) -> None:
    """Run until SIGTERM or SIGINT, then wait until the jobs have saved their state and stopped.

    A second signal ends the wait.
    """
    check_exposure(settings)
    with contextlib.closing(bind(settings)) as bound:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        opening = asyncio.create_task(Runtime.open(settings, loops=loops))
        runtime = await _unless_stopped(opening, stop)
        if runtime is None:
            return
        try:
            link = sign_in_link(settings, address_of(bound))
            app = create_app(settings, runtime)
            tune_interpreter()
            await _answer(app, runtime, settings, bound, stop, link)
            await runtime.clear_cluster(stop, _print)
        finally:
            await runtime.stop()


def _print(line: str) -> None:
    print(line, flush=True)


async def _unless_stopped(opening: asyncio.Task[Runtime], stop: asyncio.Event) -> Runtime | None:
    """Return the runtime, or None if the server was asked to stop while the runtime was opening.

    If the server is asked to stop while the runtime is opening, this function lets the runtime
    finish opening and then stops it, so that no part of the runtime remains.
    """
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    runtime = await opening
    if not stop.is_set():
        return runtime
    await runtime.stop()
    return None


async def _answer(
    app: FastAPI,
    runtime: Runtime,
    settings: Settings,
    bound: socket.socket,
    stop: asyncio.Event,
    link: str | None,
) -> None:
    """Serve HTTP until `stop` is set."""
    limits = Limits.of(settings)
    proxies = settings.forwarded_allow_ips or ()
    config = connections.config(app, limits, stop_within_s=STOP_WITHIN_S, proxies=proxies)
    server = Server(config)
    helpers = [
        asyncio.create_task(_stop_server(app, server, stop)),
        asyncio.create_task(_announce(runtime, address_of(bound), link, server)),
    ]
    try:
        await server.serve(sockets=[bound])
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _stop_server(app: FastAPI, server: Server, stop: asyncio.Event) -> None:
    await stop.wait()
    stop.clear()
    app.state.context.stopping.set()
    server.should_exit = True
    await stop.wait()
    server.force_exit = True


async def _announce(runtime: Runtime, address: str, link: str | None, server: Server) -> None:
    """Print the API's address and the sign-in link and, once Ray responds, the Ray dashboard's
    address.

    The link is a secret, so it is printed and not logged.
    """
    with runtime.signals.subscribe(QUEUE) as woken:
        while not server.started:
            await asyncio.sleep(0.02)
        print(f"dray answers at {address}", flush=True)
        if link is not None:
            print(f"to sign in through a forwarded port or as another user: {link}", flush=True)
        while True:
            cluster = await runtime.queries.cluster()
            if cluster.connected and cluster.ray_dashboard:
                print(f"Ray dashboard at {cluster.ray_dashboard}", flush=True)
                return
            await woken.wait(1.0)


def main() -> int:
    """Run the server. Returns the exit code: 0 if a signal stopped the server, 1 if the server
    can't start."""
    parser = argparse.ArgumentParser(prog="python -m api", description="The dray server.")
    parser.add_argument(
        "--no-loops",
        action="store_true",
        help="only serve requests, without running the background loops of `python -m service`",
    )
    arguments = parser.parse_args()
    write_privately()
    try:
        settings = read_settings()
        raise_descriptor_limit()
        logging_setup.configure(settings.log_format)
        asyncio.run(serve(settings, loops=not arguments.no_loops))
    except (StartRefused, ClusterUnavailable, DomainError, ValueError) as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
