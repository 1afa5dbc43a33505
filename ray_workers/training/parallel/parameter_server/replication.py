"""A server's shard on the next server too: what is sent there, what is kept there, and given back.

A server answers a worker only once the next server has the message that it answers, in the order in
which both take the messages. So the replica has every update that any worker knows to be done, and
a worker whose answer was lost with the server sends its message again.
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
"""Between two looks whether a server that has nothing to be sent is there."""
RETRY_S: Final = 0.02
MAX_RETRY_S: Final = 0.2
"""Between two attempts to reach a server that is away, the first and later ones: all workers ask
the attempt's store for it, through which its successor comes."""


def key_of(server: int) -> str:
    """Of a server's address and secret in the attempt's store."""
    return f"parameter-server-{server}"


def reconnect(store: Store, server: int) -> TensorConnection:
    """To a server that was lost, or has not begun, once it is there; ConnectionLost once the result
    is stored. The supervisor ends the attempt if no server comes."""
    pause_s = RETRY_S
    while True:
        if store.check([FINISHED_KEY]):
            raise ConnectionLost("the training is over, and the server gone")
        if store.check([key_of(server)]):
            with contextlib.suppress(ConnectionLost):  # it is the address of the lost one
                return connect(store, key_of(server))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RETRY_S)


class Superseded(dist.DistNetworkError):
    """Another process has taken this server's place."""


class Entry(NamedTuple):
    """A message that the replica is to take."""

    number: int
    header: Mapping[str, Any]
    payload: Tensor


class ReplicationLog:
    """The messages that a server has taken, on their way to its replica."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque()
        self.newest = 0
        """Number of the newest message."""
        self._acknowledged = 0
        self._is_over = False

    def add(self, header: Mapping[str, Any], payload: Tensor) -> None:
        with self._changed:
            self.newest += 1
            self._entries.append(Entry(self.newest, header, payload))
            self._changed.notify_all()

    def forget_all(self) -> int:
        """Leave out what a snapshot has; the number of its newest message."""
        with self._changed:
            self._entries.clear()
            return self.newest

    def take(self, limit_s: float) -> list[Entry]:
        """All messages that are to be sent, or none after so long without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries, timeout=limit_s)
            entries = list(self._entries)
            self._entries.clear()
            return entries

    def acknowledge(self, number: int) -> None:
        """The replica has all messages up to this one."""
        with self._changed:
            self._acknowledged = number
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Until the replica has the message, or needs none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._acknowledged >= number)

    def end(self) -> None:
        """The result is stored: a replica is of no more use."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Replicator:
    """Sends the messages of a log to the next server, from a thread of its own."""

    def __init__(
        self,
        log: ReplicationLog,
        snapshot: Callable[[], tuple[int, ShardSnapshot]],
        store: Store,
        keeper: int,
        generation: int,
    ) -> None:
        """snapshot: gives the state after all messages of the log up to a number, and leaves these
        out of the log. keeper: the next server. generation: as of `ShardServer`."""
        self._log = log
        self._snapshot = snapshot
        self._store = store
        self._keeper = keeper
        self._generation = generation

    def run(self) -> None:
        """Until the result is stored. A server that comes in the place of a lost one gets the whole
        state first. Superseded if this process was taken for lost."""
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
            raise Superseded("another process has taken the place of this server")
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
    """The replica of the server before, and the threads that keep it and give it back."""

    def __init__(self, make: Callable[[], ServedShard], *, is_newcomer: bool) -> None:
        """make: the shard of the server before, without weights. is_newcomer: whether this server
        has come in the place of a lost one."""
        self._make = make
        self._is_newcomer = is_newcomer
        self._changed = threading.Condition()
        self._replica: ServedShard | None = None
        self._followed: TensorConnection | None = None
        """Over which messages for it come."""
        self._generation = 0
        """In which round the newest process came that is known to be the server before."""

    def follow(
        self, connection: TensorConnection, hello: Mapping[str, Any], payload: Tensor
    ) -> None:
        """Keep a replica of the server at the other end, until the connection is lost, or another
        process takes that server's place."""
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
        """Whether no later process than that of this generation is known. The one before may be
        stopped, and not dead: nothing of it is taken from now on. Under the lock."""
        if generation < self._generation:
            return False
        self._generation = generation
        if self._followed is not None:
            self._followed.close()
        return True

    def give(self, connection: TensorConnection, generation: int) -> None:
        """Give the state to the process of this generation, which takes the place of a lost one."""
        with self._changed:
            if not self._takes_from(generation):
                raise ConnectionLost("yet another process has taken the place of the lost server")
            # All that the lost one was told to be kept is taken first.
            self._changed.wait_for(lambda: self._followed is None)
            replica = self._replica
        if replica is not None:
            send_snapshot(connection, {"is_known": True}, replica.snapshot())
        else:
            connection.send({"is_known": not self._is_newcomer, "about": None})


def taken_over(
    store: Store, server: int, num_servers: int, generation: int
) -> ShardSnapshot | None:
    """The state of a server that was lost, for the process of this generation in its place; None if
    the lost one had none. ConnectionLost if the replica is lost too, or the training is over."""
    keeper = (server + 1) % num_servers
    with contextlib.closing(reconnect(store, keeper)) as connection:
        connection.send({"takes_over": True, "generation": generation})
        header, payload = connection.receive()
    if not header["is_known"]:
        raise ConnectionLost(f"servers {server} and {keeper} were lost, and a shard with them")
    return None if header["about"] is None else received_snapshot(header, payload)


def send_snapshot(
    connection: TensorConnection, header: Mapping[str, Any], snapshot: ShardSnapshot
) -> None:
    tensors = snapshot.tensors
    about = {"about": snapshot.about, "tensors": shapes_of(tensors)}
    connection.send({**header, **about}, *tensors.values())


def received_snapshot(header: Mapping[str, Any], payload: Tensor) -> ShardSnapshot:
    return ShardSnapshot(header["about"], unpacked(header["tensors"], payload))
