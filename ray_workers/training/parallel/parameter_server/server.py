"""The process of a server: it serves its shard to the workers, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from dray import spec
from dray.train.kv.connection import (
    DTYPES,
    ConnectionLost,
    TensorConnection,
    listening,
    shapes_of,
    unpacked,
)
from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.parallel.parameter_server.dealer import (
    Dealer,
    Deals,
    SharedDealer,
    SynchronousDealer,
)
from ray_workers.training.parallel.parameter_server.layout import Sizes
from ray_workers.training.parallel.parameter_server.shard import (
    DoneBatches,
    ParameterShard,
    Push,
)

SHOW_S: Final = 0.1
"""Between two updates of a server's heartbeat page."""


def key_of(server: int) -> str:
    """Of a server's address and secret in the attempt's store."""
    return f"parameter-server-{server}"


class ShardServer:
    """Answers the messages of workers. All state is under one lock."""

    def __init__(self, index: int, num_workers: int, document: spec.JobSpec) -> None:
        """index: the server's number; server 0 deals the batches out too."""
        assert isinstance(document.sync, spec.ParameterServer)
        self._index = index
        self._num_workers = num_workers
        self._sync = document.sync
        self._optimizer = document.train.optimizer
        self._lock = threading.Condition()
        self._shard: ParameterShard | None = None
        self._dealer: Dealer | None = None
        self._connections: dict[int, TensorConnection] = {}
        """Of each worker the newest."""
        self._notes: dict[str, Any] = {}
        """The chief's state besides the weights, for the process that may take its place."""
        self._fingerprint: str | None = None
        self._is_finished = False

    @property
    def version(self) -> int:
        """Batches that the shard's weights have seen."""
        return 0 if self._shard is None else self._shard.version

    def is_over(self, wait_s: float) -> bool:
        """Whether the chief has finished and all workers are gone; waits for that for a while."""
        with self._lock:
            return self._lock.wait_for(
                lambda: self._is_finished and not self._connections, timeout=wait_s
            )

    def serve(self, connection: TensorConnection) -> None:
        """Answer one worker until it is gone."""
        hello, _ = connection.receive()
        worker = int(hello["worker"])
        try:
            self._join(worker, connection, hello)
            while True:
                header, payload = connection.receive()
                self._answer(worker, connection, header, payload)
        finally:
            self._lose(worker, connection)

    def _join(self, worker: int, connection: TensorConnection, hello: Mapping[str, Any]) -> None:
        with self._lock:
            older = self._connections.get(worker)
            if older is not None:  # the worker's node is gone without a word
                older.close()
            self._connections[worker] = connection
            self._fingerprint = self._fingerprint or hello["fingerprint"]
            if self._dealer is not None:
                self._send(self._dealer.join(worker))
            is_ready, version, notes = self._shard is not None, self.version, self._notes
            is_same = self._fingerprint == hello["fingerprint"]
        connection.send(
            {"is_ready": is_ready, "version": version, "notes": notes, "is_same": is_same}
        )

    def _lose(self, worker: int, connection: TensorConnection) -> None:
        with self._lock:
            if self._connections.get(worker) is not connection:
                return  # another process has taken its place
            del self._connections[worker]
            if self._shard is not None:
                self._shard.lost(worker)
            if self._dealer is not None:
                self._send(self._dealer.lost(worker))
            self._lock.notify_all()

    def _answer(
        self, worker: int, connection: TensorConnection, header: Mapping[str, Any], payload: Tensor
    ) -> None:
        match header["op"]:
            case "push":
                gradient = payload.view(DTYPES[self._sync.push_dtype]).float()
                push = Push(worker, header["batch"], header["lr"], header["loss"], gradient)
                with self._lock:
                    pushed = self._ready().push(push)
                connection.send(vars(pushed))
            case "take":
                with self._lock:
                    self._ready()
                    assert self._dealer is not None
                    # Another process may have taken the worker's place.
                    if self._connections.get(worker) is connection:
                        self._send(self._dealer.take(worker, header["done"]))
            case "pull":
                with self._lock:
                    weights = self._ready().pull(worker, header["version"])
                    values = weights.values.clone()
                about = {"loss": weights.loss, "squares": weights.squares}
                connection.send({"version": weights.version, **about}, values)
            case "state":
                self._give_state(connection)
            case "begin":
                self._begin(header, payload)
                connection.send({})
            case "note":
                with self._lock:
                    self._notes = dict(header["notes"])
                connection.send({})
            case "stop" | "finish" as word:
                with self._lock:
                    if self._dealer is not None:
                        ends = self._dealer.stop if word == "stop" else self._dealer.finish
                        self._send(ends())
                    self._is_finished = self._is_finished or word == "finish"
                    self._lock.notify_all()
                connection.send({})

    def _ready(self) -> ParameterShard:
        """Once the chief has given the first weights; called under the lock."""
        self._lock.wait_for(lambda: self._shard is not None)
        assert self._shard is not None
        return self._shard

    def _begin(self, header: Mapping[str, Any], payload: Tensor) -> None:
        """Take the first weights. The chief that comes after one that died may give them again."""
        with self._lock:
            if self._shard is not None:
                return
            is_synchronous = self._sync.mode == "synchronous"
            shard = ParameterShard(
                Sizes(*header["sizes"]),
                self._optimizer,
                self._num_workers if is_synchronous else None,
                self._sync.correction,
            )
            done = DoneBatches(header["done"][0], set(header["done"][1]))
            shard.load(unpacked(header["tensors"], payload), done)
            self._shard = shard
            self._notes = dict(header["notes"])
            if self._index == 0:
                self._dealer = self._dealer_of(header)
                for worker in self._connections:
                    self._dealer.join(worker)
            self._lock.notify_all()

    def _dealer_of(self, header: Mapping[str, Any]) -> Dealer:
        last, following, again = header["last"], header["next"], header["again"]
        if self._sync.mode == "synchronous":
            return SynchronousDealer(self._num_workers, last, following - 1)
        return SharedDealer(last, following, again, self._sync.max_staleness)

    def _give_state(self, connection: TensorConnection) -> None:
        with self._lock:
            shard = self._ready()
            tensors = shard.state()
            done = [shard.done.all_up_to, sorted(shard.done.above)]
            staleness = sorted(shard.staleness.items())
        connection.send(
            {"tensors": shapes_of(tensors), "done": done, "staleness": staleness},
            *tensors.values(),
        )

    def _send(self, deals: Deals) -> None:
        """Under the lock: the messages are small, and those who get them wait for them."""
        for worker, batch in deals:
            try:
                self._connections[worker].send({"batch": batch})
            except ConnectionLost:
                continue  # the thread of its connection sees that too


def serve(
    document: spec.JobSpec,
    index: int,
    rendezvous: RendezvousHandler,
    page: HeartbeatPage,
    address: str,
) -> None:
    """Serve as the server with this number until the job is done. address: of this node."""
    sync = document.sync
    assert isinstance(sync, spec.ParameterServer)
    server = ShardServer(index, document.resources.num_workers - sync.servers, document)
    store = rendezvous.meet_without_group()
    with listening(store, key_of(index), address, server.serve):
        page.enter(RankPhase.EXCHANGE, TimeCategory.USEFUL)
        page.begin(rendezvous.place.generation, 0)
        while not server.is_over(SHOW_S):
            if server.version:
                page.commit(server.version)
