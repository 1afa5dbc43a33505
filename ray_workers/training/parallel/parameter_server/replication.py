"""Replication of a server's shard on the next server: sending, keeping and restoring the replica.

A server replies to a worker only after the next server has received the worker's message. Both
servers process messages in the same order. Therefore, the replica includes every update that was
confirmed to a worker. A worker whose reply was lost with the server sends its message again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dray.train.kv.connection import (
    ConnectionLost,
    TensorConnection,
    connect,
    shapes_of,
    unpacked,
)
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.core.progress import FINISHED_KEY
from ray_workers.training.parallel.parameter_server.served_shard import ServedShard
from ray_workers.training.parallel.parameter_server.shard import ShardSnapshot

LOOK_S: Final = 0.1
"""Interval in seconds at which the connection is checked while there are no messages to send."""
RETRY_S: Final = 0.02
MAX_RETRY_S: Final = 0.2
"""Initial and maximum interval in seconds between attempts to reach a lost server. All workers poll
the attempt's store, in which the lost server's replacement publishes its address."""


def key_of(server: int) -> str:
    """Return the key of a server's address and secret in the attempt's store."""
    return f"parameter-server-{server}"


def reconnect(store: Store, server: int) -> TensorConnection:
    """Wait for a server that was lost or has not started yet, and connect to it. Raises
    ConnectionLost if training has ended and its result has been stored. If no server appears, the
    supervisor ends the attempt."""
    pause_s = RETRY_S
    while True:
        if store.check([FINISHED_KEY]):
            raise ConnectionLost("training has ended, and the parameter server no longer exists")
        if store.check([key_of(server)]):
            with contextlib.suppress(
                ConnectionLost
            ):  # the address might be that of the lost server
                return connect(store, key_of(server))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RETRY_S)


class Superseded(dist.DistNetworkError):
    """Raised if another process has replaced this server."""


class Entry(NamedTuple):
    """A message for the replica."""

    number: int
    header: Mapping[str, Any]
    payload: Tensor


class ReplicationLog:
    """Messages that a server has processed and that must be sent to its replica."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque()
        self.newest = 0
        """Number of the latest message."""
        self._acknowledged = 0
        self._is_over = False

    def add(self, header: Mapping[str, Any], payload: Tensor) -> None:
        with self._changed:
            self.newest += 1
            self._entries.append(Entry(self.newest, header, payload))
            self._changed.notify_all()

    def forget_all(self) -> int:
        """Remove all messages, because a snapshot includes their effects, and return the number of
        the latest message."""
        with self._changed:
            self._entries.clear()
            return self.newest

    def take(self, limit_s: float) -> list[Entry]:
        """Wait up to `limit_s` for messages, and remove and return all messages to send."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries, timeout=limit_s)
            entries = list(self._entries)
            self._entries.clear()
            return entries

    def acknowledge(self, number: int) -> None:
        """Record that the replica has received all messages up to `number`."""
        with self._changed:
            self._acknowledged = number
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until the replica has received the message, or needs no more messages."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._acknowledged >= number)

    def end(self) -> None:
        """Stop waiting for the replica. The result has been stored, so the replica is no longer
        needed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Replicator:
    """Sends the messages of a log to the next server, in a separate thread."""

    def __init__(
        self,
        log: ReplicationLog,
        snapshot: Callable[[], tuple[int, ShardSnapshot]],
        store: Store,
        keeper: int,
        generation: int,
    ) -> None:
        """snapshot: clears the log, and returns the number of the last message in the log and the
        state after this message. keeper: index of the next server, which has the replica.
        generation: as in `ShardServer`."""
        self._log = log
        self._snapshot = snapshot
        self._store = store
        self._keeper = keeper
        self._generation = generation

    def run(self) -> None:
        """Replicate until the result has been stored. A new process of the next server first
        receives the complete state. Raises Superseded if this server was considered lost and has
        been replaced."""
        while True:
            try:
                with contextlib.closing(reconnect(self._store, self._keeper)) as connection:
                    self._send_all(connection)
            except ConnectionLost:
                if self._store.check([FINISHED_KEY]):
                    return

    def _send_all(self, connection: TensorConnection) -> None:
        number, snapshot = self._snapshot()
        send_snapshot(connection, {"is_replica": True, "generation": self._generation}, snapshot)
        answer, _ = connection.receive()
        if answer["is_superseded"]:
            raise Superseded("another process has replaced this server")
        self._log.acknowledge(number)
        while True:
            entries = self._log.take(LOOK_S)
            if not entries:
                connection.check_open()
                continue
            last = entries[-1].number
            for number, header, payload in entries:
                connection.send({**header, "is_last": number == last}, payload)
            connection.receive()
            self._log.acknowledge(last)


class ReplicaHolder:
    """The replica of the previous server, with methods that update the replica and send it to a
    replacement."""

    def __init__(self, make: Callable[[], ServedShard], *, is_newcomer: bool) -> None:
        """make: creates the previous server's shard, without weights. is_newcomer: whether this
        process has replaced a lost server."""
        self._make = make
        self._is_newcomer = is_newcomer
        self._changed = threading.Condition()
        self._replica: ServedShard | None = None
        self._followed: TensorConnection | None = None
        """The connection that receives messages for the replica."""
        self._generation = 0
        """The round in which the previous server's process (the newest one known) started."""

    def follow(
        self, connection: TensorConnection, hello: Mapping[str, Any], payload: Tensor
    ) -> None:
        """Maintain a replica of the server at the other end of the connection, until the connection
        is lost or another process replaces this server."""
        with self._changed:
            is_newest = self._takes_from(hello["generation"])
            if is_newest:
                self._followed = connection
        if not is_newest:
            connection.send({"is_superseded": True})
            return
        try:
            replica = self._make()
            replica.restore(received_snapshot(hello, payload))
            with self._changed:
                if self._followed is connection:
                    self._replica = replica
            connection.send({"is_superseded": False})
            while True:
                header, payload = connection.receive()
                if header["is_last"]:
                    connection.send({})
                replica.answer(header["worker"], header, payload)
        finally:
            with self._changed:
                if self._followed is connection:
                    self._followed = None
                    self._changed.notify_all()

    def _takes_from(self, generation: int) -> bool:
        """Whether this is the latest known generation of the previous server's process. If the
        result is true, messages from older processes are rejected from now on, because an older
        process might be stopped but not dead. Must be called while the lock is held."""
        if generation < self._generation:
            return False
        self._generation = generation
        if self._followed is not None:
            self._followed.close()
        return True

    def give(self, connection: TensorConnection, generation: int) -> None:
        """Send the state to the process of this generation, which replaces a lost process."""
        with self._changed:
            if not self._takes_from(generation):
                raise ConnectionLost("a newer process has already replaced the lost server")
            # First wait until all messages from the lost process have been processed.
            self._changed.wait_for(lambda: self._followed is None)
            replica = self._replica
        if replica is not None:
            send_snapshot(connection, {"is_known": True}, replica.snapshot())
        else:
            connection.send({"is_known": not self._is_newcomer, "about": None})


def taken_over(
    store: Store, server: int, num_servers: int, generation: int
) -> ShardSnapshot | None:
    """Return the state of a lost server to its replacement process of this generation; None if the
    server had no state. Raises ConnectionLost if the replica is also lost, or if the training has
    ended."""
    keeper = (server + 1) % num_servers
    with contextlib.closing(reconnect(store, keeper)) as connection:
        connection.send({"takes_over": True, "generation": generation})
        header, payload = connection.receive()
    if not header["is_known"]:
        raise ConnectionLost(
            f"the shard of server {server} is lost, because its replica on "
            f"server {keeper} is also lost"
        )
    return None if header["about"] is None else received_snapshot(header, payload)


def send_snapshot(
    connection: TensorConnection, header: Mapping[str, Any], snapshot: ShardSnapshot
) -> None:
    tensors = snapshot.tensors
    about = {"about": snapshot.about, "tensors": shapes_of(tensors)}
    connection.send({**header, **about}, *tensors.values())


def received_snapshot(header: Mapping[str, Any], payload: Tensor) -> ShardSnapshot:
    return ShardSnapshot(header["about"], unpacked(header["tensors"], payload))
