"""The rendezvous store of one attempt, in a process of its own so that it outlives any rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ray_workers.shared.peers.store_proxy import StoreProxy

if TYPE_CHECKING:
    from ray_workers.training.core.compat_torch import TCPStore

START_LIMIT = timedelta(seconds=60)
SECRET_BYTES = 32


def new_store(listener: socket.socket, address: str, port: int) -> TCPStore:
    """Serve a store to those who connect to `listener`; it connects to itself by address and port.

    torch asks that a listener which it did not make be bound to that port.
    """
    from ray_workers.training.core.compat_torch import TCPStore

    # Not on libuv: it changes what it watches by way of io_uring, and can lose a socket that takes
    # the number of one that was just closed. Seen as a request that was never read, after ranks
    # had been killed.
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=False,
        timeout=START_LIMIT,
        master_listen_fd=listener.detach(),
    )


def loopback_store() -> TCPStore:
    """Serve a store without a secret at a free port of loopback: for measuring and for tests."""
    listener = socket.create_server(("127.0.0.1", 0))
    return new_store(listener, "127.0.0.1", listener.getsockname()[1])


def serve(address: str, temp_dir: Path) -> int:
    """Serve a store behind a `StoreProxy` at this address of the node, and stay until killed.

    temp_dir: the attempt's folder for temporary files.

    Prints the proxy's port and its secret in hexadecimal digits, or else why it can't.
    """
    # torch warns of each connection that it is none of TCP, and nobody reads what this prints.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        asyncio.run(_serve(address, temp_dir))
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _serve(address: str, temp_dir: Path) -> None:
    outer = _outer_listener(address)
    port = outer.getsockname()[1]
    inner, path = _inner_listener(port, temp_dir)
    secret = secrets.token_bytes(SECRET_BYTES)
    proxy = StoreProxy(secret, path)
    server = await proxy.listen(outer)
    store = await asyncio.to_thread(new_store, inner, address, port)
    proxy.is_open = True
    _say(f"{port} {secret.hex()}")
    await server.serve_forever()
    del store  # it is served as long as it is held


def _outer_listener(address: str) -> socket.socket:
    """At a free port of the address whose number can be the name of a file."""
    while True:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        if not {0, ord("/")} & set(_name_of(listener.getsockname()[1])):
            return listener
        listener.close()


def _inner_listener(port: int, temp_dir: Path) -> tuple[socket.socket, str]:
    """A Unix socket that this process alone can connect to, and its path.

    The file is gone at once; what is left is a descriptor of it. torch reads the port of a listener
    where an IPv6 address has it, which in that of a Unix socket is the first two bytes of its path.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temp_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    unique = tempfile.TemporaryDirectory(prefix="dray-store-", dir=temp_dir)
    with unique as folder, contextlib.chdir(folder):
        listener.bind(_name_of(port))
        fd = os.open(_name_of(port), os.O_PATH | os.O_CLOEXEC)
    return listener, f"/proc/self/fd/{fd}"


def _name_of(port: int) -> bytes:
    return port.to_bytes(2, "big")
