"""The rendezvous store of one attempt. The store runs in its own process, so that it outlives any
rank."""

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
    """Serve a store on `listener`, and connect to it by address and port.

    torch requires an externally created listener to be bound to this port.
    """
    from ray_workers.training.core.compat_torch import TCPStore

    # Don't use libuv: it updates the set of watched descriptors through io_uring, and can miss a
    # socket that reuses the number of a recently closed socket. In one case, after ranks had been
    # killed, a request was never read.
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
    """Serve a store without a secret on a free loopback port, for measurements and tests."""
    listener = socket.create_server(("127.0.0.1", 0))
    return new_store(listener, "127.0.0.1", listener.getsockname()[1])


def serve(address: str, temp_dir: Path) -> int:
    """Serve a store behind a `StoreProxy` at this address of the node until killed.

    temp_dir: the attempt's folder for temporary files.

    Prints the proxy's port and its hexadecimal secret, or an error.
    """
    # Discard stderr: torch warns that a connection is not a TCP connection, and no process reads
    # these warnings.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        asyncio.run(_serve(address, temp_dir))
    except Exception as error:
        _print_line(f"{type(error).__name__}: {error}")
    return 1


def _print_line(line: str) -> None:
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
    _print_line(f"{port} {secret.hex()}")
    await server.serve_forever()
    del store  # the store serves as long as it is referenced


def _outer_listener(address: str) -> socket.socket:
    """Listen on a free port whose number, as two bytes, is a valid file name."""
    while True:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        if not {0, ord("/")} & set(_name_of(listener.getsockname()[1])):
            return listener
        listener.close()


def _inner_listener(port: int, temp_dir: Path) -> tuple[socket.socket, str]:
    """Return a Unix socket to which only this process can connect, and its path.

    The file is deleted immediately, so that only the open descriptor remains. torch reads the port
    of a listener at the offset that the port has in an IPv6 address; in the address of a Unix
    socket, this offset holds the first two bytes of the path.
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
