"""An attempt's rendezvous store can be accessed only with its secret, and only by processes of this
user."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from ray_workers.shared.contracts import Cause
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.peers import store_proxy
from ray_workers.shared.peers.store_proxy import MAX_UNPROVED, StoreForwarder
from ray_workers.training.core.errors import cause_of
from ray_workers.training.core.faultpoints import FaultPoint, arm, disarm
from ray_workers.training.elastic import store_server
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from tests.unit.workers.other_user import needs_root, run_as_another
from tests.wire import rank_task

ADDRESS = "127.0.0.1"
PATIENCE_S = 60.0
WRITE = """
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(bytes(128))
try:
    print(connection.recv(4096), flush=True)
except ConnectionError:
    print(b"", flush=True)
"""


STORE = "dray-store"
"""Name of the process; processes from other tests might still be ending."""


def _serve(write_end: int) -> None:
    os.dup2(write_end, 1)
    sys.stdout = os.fdopen(1, "w")
    store_server.serve(ADDRESS, Path(tempfile.gettempdir()))


@pytest.fixture
async def served() -> AsyncIterator[tuple[int, bytes]]:
    """The port and secret of a store in a separate process."""
    read_end, write_end = os.pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(write_end,), daemon=True, name=STORE)
    process.start()
    os.close(write_end)
    with os.fdopen(read_end) as output:
        port, secret = (await asyncio.to_thread(output.readline)).split()
        yield int(port), bytes.fromhex(secret)
    process.kill()
    process.join()


def _client(port: int, limit_s: float = PATIENCE_S) -> TCPStore:
    timeout = timedelta(seconds=limit_s)
    return TCPStore(ADDRESS, port, wait_for_workers=False, timeout=timeout)


async def _forwarded(port: int, secret: bytes) -> tuple[StoreForwarder, int]:
    forwarder = StoreForwarder(ADDRESS, port, secret)
    return forwarder, await forwarder.listen(ADDRESS)


async def test_torchs_own_client_reaches_it_through_a_forwarder(served: tuple[int, bytes]) -> None:
    forwarders = [await _forwarded(*served) for _ in range(2)]
    one, other = [await asyncio.to_thread(_client, port) for _, port in forwarders]
    large = secrets.token_bytes(1 << 20)
    await asyncio.to_thread(one.set, "key", large.hex())
    assert await asyncio.to_thread(other.get, "key") == large.hex().encode()
    assert await asyncio.to_thread(other.add, "count", 2) == 2


async def test_zeros_do_not_disturb_it(served: tuple[int, bytes]) -> None:
    _, port = await _forwarded(*served)
    client = await asyncio.to_thread(_client, port)
    await asyncio.to_thread(client.set, "key", "1")
    for _ in range(3):
        reader, writer = await asyncio.open_connection(ADDRESS, served[0])
        writer.write(bytes(128))
        await reader.readexactly(store_proxy.NONCE_BYTES)
        # The connection is closed without a response.
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
        writer.close()
    assert await asyncio.to_thread(client.get, "key") == b"1"
    again = await asyncio.to_thread(_client, port)
    assert await asyncio.to_thread(again.get, "key") == b"1"


async def test_one_that_is_stopped_is_not_heard(served: tuple[int, bytes]) -> None:
    (process,) = (one for one in multiprocessing.active_children() if one.name == STORE)
    assert process.pid is not None
    async with asyncio.timeout(PATIENCE_S):
        await store_proxy.hear(ADDRESS, served[0])
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await store_proxy.hear(ADDRESS, served[0])
    os.kill(process.pid, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_S):
        await store_proxy.hear(ADDRESS, served[0])


async def test_who_does_not_know_the_secret_is_hung_up_on(served: tuple[int, bytes]) -> None:
    streams = await asyncio.open_connection(ADDRESS, served[0])
    with pytest.raises((store_proxy.NotProved, ConnectionError)):
        await store_proxy.prove_rank(streams, secrets.token_bytes(32))
    streams[1].close()


async def test_a_store_that_does_not_know_it_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    rank = await asyncio.open_connection(sock=ours)
    proving = asyncio.ensure_future(store_proxy.prove_rank(rank, b"secret"))
    reader, writer = await asyncio.open_connection(sock=theirs)
    writer.write(secrets.token_bytes(32))
    await reader.readexactly(64)
    writer.write(secrets.token_bytes(32))
    with pytest.raises(store_proxy.NotProved):
        await proving
    for end in (rank[1], writer):
        end.close()


async def test_silent_connections_keep_nobody_out(served: tuple[int, bytes]) -> None:
    silent = [await asyncio.open_connection(ADDRESS, served[0]) for _ in range(MAX_UNPROVED + 1)]
    _, port = await _forwarded(*served)
    client = await asyncio.to_thread(_client, port)
    assert await asyncio.to_thread(client.add, "count", 1) == 1
    for _, writer in silent:
        writer.close()


async def test_the_store_listens_on_its_nodes_address_alone(served: tuple[int, bytes]) -> None:
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.2", served[0])


@needs_root
async def test_a_forwarder_serves_no_other_user(served: tuple[int, bytes]) -> None:
    _, port = await _forwarded(*served)
    other = run_as_another(WRITE, str(port))
    told, _ = await asyncio.to_thread(other.communicate, timeout=PATIENCE_S)
    assert told == "b''\n"


def test_what_the_store_spoils_is_not_the_users_error() -> None:
    def spoil() -> None:
        raise RuntimeError("Invalid argument: 0 is no address")

    store = store_server.loopback_store()
    store.set("generation-0/here-1", "1")
    task = rank_task(world_size=2, generation=0, page_prefix="", master_port=store.port)
    handler = RendezvousHandler(task, HeartbeatPage(None))
    arm(FaultPoint.PEERS_ARE_THERE, spoil)
    try:
        with pytest.raises(DistStoreError, match="0 is no address") as caught:
            handler.join(lambda: None)
    finally:
        disarm()
    assert cause_of(caught.value) is Cause.WORKER_LOST
