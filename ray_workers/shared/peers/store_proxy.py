"""Authenticated connections to an attempt's rendezvous store.

torch's TCPStore has no authentication: every process that connects can read and write every key.
Therefore the store itself listens on a Unix socket that only its own process can reach. A
`StoreProxy` on the node's address forwards a connection once the other end has proved that it knows
the attempt's secret. Torch and scripts connect to MASTER_ADDR and MASTER_PORT without
authenticating. Therefore, each rank actor runs a `StoreForwarder` at this address, which accepts
connections from this user's processes on this machine, and proves knowledge of the secret on behalf
of these processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable

from ray_workers.shared.peers.peer_credentials import is_own_peer

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

NONCE_BYTES = 32
PROOF_LIMIT_S = 30.0
"""Maximum number of seconds for the two ends to authenticate to each other."""
MAX_UNPROVED = 256
"""Maximum number of unauthenticated connections. If there are more connections, the oldest one is
closed."""
BACKLOG = 1024
BLOCK_BYTES = 1 << 16


class NotProved(Exception):
    """The other end does not know the secret, or closed the connection before proving it."""


async def prove_rank(streams: Streams, secret: bytes) -> None:
    """Prove knowledge of the secret as the connecting end, and verify the store's proof."""
    reader, writer = streams
    theirs, ours = await _exactly(reader), secrets.token_bytes(NONCE_BYTES)
    writer.write(ours + _proof(secret, b"rank", theirs, ours))
    if not hmac.compare_digest(await _exactly(reader), _proof(secret, b"store", theirs, ours)):
        raise NotProved


async def prove_store(streams: Streams, secret: bytes) -> None:
    """Verify the proof of the connecting end, and prove to this end that the store knows the
    secret."""
    reader, writer = streams
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(ours)
    theirs, proof = await _exactly(reader), await _exactly(reader)
    if not hmac.compare_digest(proof, _proof(secret, b"rank", ours, theirs)):
        raise NotProved
    writer.write(_proof(secret, b"store", ours, theirs))


async def hear(address: str, port: int) -> None:
    """Return once the proxy has asked for the secret, which shows that the proxy is not suspended.

    Raises OSError if the proxy does not listen or closes the connection.
    """
    reader, writer = await asyncio.open_connection(address, port)
    try:
        await _exactly(reader)
    except NotProved:
        raise ConnectionError("the store's proxy closed the connection") from None
    finally:
        writer.transport.abort()


async def _exactly(reader: asyncio.StreamReader) -> bytes:
    """Read a nonce or a proof; both are as long as a SHA-256 hash."""
    try:
        return await reader.readexactly(NONCE_BYTES)
    except asyncio.IncompleteReadError:
        raise NotProved from None


def _proof(secret: bytes, role: bytes, store_nonce: bytes, rank_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + store_nonce + rank_nonce, "sha256")


class StoreProxy:
    """Forwards connections to the store's Unix socket."""

    def __init__(self, secret: bytes, store_path: str) -> None:
        self._secret = secret
        self._store_path = store_path
        self._unproved: list[asyncio.StreamWriter] = []
        self.is_open = False
        """False while the store starts and connects to itself. While the flag is False, other
        processes don't know the address, and this user's processes need not authenticate."""

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._accept, sock=listener, backlog=BACKLOG)

    async def _accept(self, *streams: *Streams) -> None:
        writer = streams[1]
        self._unproved.append(writer)
        if len(self._unproved) > MAX_UNPROVED:
            self._unproved.pop(0).transport.abort()

        async def reach() -> Streams:
            try:
                if self.is_open:
                    await prove_store(streams, self._secret)
                elif not _is_own(writer):
                    raise NotProved
            finally:
                if writer in self._unproved:
                    self._unproved.remove(writer)
            return await asyncio.open_unix_connection(self._store_path)

        await _pass_on(streams, reach)


class StoreForwarder:
    """Forwards connections from this user's processes to a `StoreProxy`."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        """Prepare to forward connections to the proxy at `address` and `port`."""
        self._proxy = (address, port)
        self._secret = secret
        self._server: asyncio.Server | None = None

    async def listen(self, address: str) -> int:
        """Listen on this address of the machine, and return the port."""
        self._server = await asyncio.start_server(self._accept, address, 0, backlog=BACKLOG)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Stop accepting connections."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, *streams: *Streams) -> None:
        async def reach() -> Streams:
            if not _is_own(streams[1]):
                raise NotProved
            made = await asyncio.open_connection(*self._proxy)
            try:
                await prove_rank(made, self._secret)
            except BaseException:
                made[1].transport.abort()
                raise
            return made

        await _pass_on(streams, reach)


def _is_own(writer: asyncio.StreamWriter) -> bool:
    return is_own_peer(writer.get_extra_info("socket"))


async def _pass_on(streams: Streams, reach: Callable[[], Awaitable[Streams]]) -> None:
    """Relay data between a connection and the connection that `reach` opens, until either
    connection ends."""
    reader, writer = streams
    try:
        async with asyncio.timeout(PROOF_LIMIT_S):
            onward_reader, onward_writer = await reach()
    except (NotProved, OSError, TimeoutError):
        return writer.transport.abort()
    for end in (writer, onward_writer):
        end_socket = end.get_extra_info("socket")
        if end_socket.family != socket.AF_UNIX:
            end_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    copying = [
        asyncio.ensure_future(_copy(reader, onward_writer)),
        asyncio.ensure_future(_copy(onward_reader, writer)),
    ]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in copying:
            each.cancel()
        for end in (writer, onward_writer):
            end.close()
    return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
