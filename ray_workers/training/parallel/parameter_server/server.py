"""The process of a server, which replies to each worker's messages in a separate thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from dray import spec, train
from dray.train.kv.connection import ConnectionLost, TensorConnection, listening
from ray_workers.shared.contracts import SENT_BYTES
from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.core.progress import FINISHED_KEY
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.parallel.parameter_server.batch_dispatcher import CHIEF
from ray_workers.training.parallel.parameter_server.replication import (
    ReplicaHolder,
    ReplicationLog,
    Replicator,
    key_of,
    taken_over,
)
from ray_workers.training.parallel.parameter_server.served_shard import (
    NEED_WEIGHTS,
    ServedShard,
    ShardAnswer,
)
from ray_workers.training.parallel.parameter_server.shard import ShardSnapshot

SHOW_S: Final = 0.1
"""Interval in seconds between updates of a server's heartbeat page."""
FINISHED_LOOK_S: Final = 1.0
"""Interval in seconds at which the server checks whether the result is stored, in case the chief is
lost before it reports this."""
NO_NUMBERS: Final = torch.empty(0, dtype=torch.uint8)


class Outbox:
    """Sends replies to one worker in a separate thread, so that a slow worker does not delay other
    workers."""

    def __init__(self, connection: TensorConnection, log: ReplicationLog | None) -> None:
        self._connection = connection
        self._log = log
        self._changed = threading.Condition()
        self._answers: deque[tuple[int, ShardAnswer]] = deque()
        self._is_open = True
        threading.Thread(target=self._send_all, daemon=True).start()

    def put(self, answer: ShardAnswer) -> None:
        """Queue a reply, which is sent once the replica has all messages that this server has
        processed so far. Does not block."""
        number = 0 if self._log is None else self._log.newest
        with self._changed:
            self._answers.append((number, answer))
            self._changed.notify_all()

    def wait_until_sent(self) -> None:
        """Wait until all replies have been sent, so that replies don't accumulate for a worker that
        does not read them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._answers or not self._is_open)

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._connection.close()

    def _send_all(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._answers or not self._is_open)
                    if not self._is_open:
                        return
                    number, answer = self._answers[0]
                if self._log is not None:
                    self._log.wait(number)
                self._connection.send(answer.header or {}, *answer.tensors)
                with self._changed:
                    self._answers.popleft()
                    self._changed.notify_all()
        except ConnectionLost:
            pass
        finally:
            self.close()  # also ends the receiving thread


class ShardServer:
    """Replies to the messages of workers, and keeps the replica of the previous server.

    The state is guarded by one lock. While the lock is held, nothing is sent, and the server does
    not wait for other processes.
    """

    def __init__(
        self, index: int, num_workers: int, document: spec.JobSpec, *, generation: int = 0
    ) -> None:
        """index: index of the server. generation: the rendezvous round in which this process
        started. If `generation` is above 0, this process replaces a lost process."""
        assert isinstance(document.sync, spec.ParameterServer)
        self._index = index
        self._generation = generation
        self._sync = document.sync
        self._lock = threading.Condition()
        self._served = ServedShard(index, num_workers, document, is_replica=False)
        self._outboxes: dict[int, Outbox] = {}
        """The latest outbox of each connected worker."""
        self._log = ReplicationLog() if self._sync.shards_kept_by == "replica" else None
        before = (index - 1) % self._sync.servers
        replica = functools.partial(ServedShard, before, num_workers, document, is_replica=True)
        self._holder = ReplicaHolder(replica, is_newcomer=generation > 0)
        self._failure: BaseException | None = None
        self.began_at, self.sent_before = 0, 0
        """The values of `version` and `sent_bytes` when this process received the weights."""

    @property
    def version(self) -> int:
        """Number of batches that the shard's weights include."""
        return self._served.version

    @property
    def sent_bytes(self) -> int:
        return self._served.sent_bytes

    def is_over(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until the chief has finished and all workers have left, and
        return whether this is the case. If a thread has failed, raise its error."""
        with self._lock:
            is_over = self._lock.wait_for(
                lambda: self._failure or (self._served.is_finished and not self._outboxes),
                timeout=wait_s,
            )
            if self._failure is not None:
                raise self._failure
            return bool(is_over)

    def take_over(self, snapshot: ShardSnapshot) -> None:
        """Continue in place of a lost server. The workers reconnect by themselves."""
        with self._lock:
            self._served.restore(snapshot)
            self._note_beginning()

    def replicate(self, store: Store) -> None:
        """Maintain a replica on the next server, if the document requests it."""
        if self._log is not None:
            keeper = (self._index + 1) % self._sync.servers
            given = (self._log, self._snapshot, store, keeper, self._generation)
            replicate = self._ends_with_errors()(Replicator(*given).run)
            threading.Thread(target=replicate, daemon=True).start()

    def finish(self) -> None:
        """Finish. Called when the result is stored, in case the chief does not report this."""
        with self._lock:
            if not self._served.is_finished:
                self._take(CHIEF, None, {"op": "finish"}, NO_NUMBERS)

    def _snapshot(self) -> tuple[int, ShardSnapshot]:
        assert self._log is not None
        with self._lock:
            return self._log.forget_all(), self._served.snapshot()

    def serve(self, connection: TensorConnection) -> None:
        """Reply to one worker, or to another server, until it disconnects."""
        hello, payload = connection.receive()
        with self._ends_with_errors():
            if "is_replica" in hello:
                self._holder.follow(connection, hello, payload)
            elif "takes_over" in hello:
                self._holder.give(connection, hello["generation"])
            else:
                self._serve_worker(int(hello["worker"]), connection, hello)

    @contextlib.contextmanager
    def _ends_with_errors(self) -> Iterator[None]:
        """Make the server fail with any error that is raised in this context, in any thread."""
        try:
            yield
        except ConnectionLost:
            raise
        except BaseException as error:
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _serve_worker(
        self, worker: int, connection: TensorConnection, hello: Mapping[str, Any]
    ) -> None:
        outbox = Outbox(connection, self._log)
        try:
            with self._lock:
                older = self._outboxes.get(worker)
                if older is not None:  # the worker's node was lost without closing the connection
                    older.close()
                self._outboxes[worker] = outbox
                self._take(worker, outbox, {**hello, "op": "hello"}, NO_NUMBERS)
            while True:
                outbox.wait_until_sent()
                header, payload = connection.receive()
                with self._lock:
                    if header["op"] in NEED_WEIGHTS:
                        self._lock.wait_for(lambda: self._served.has_weights)
                    # Ignore the message if another process has replaced the worker.
                    if self._outboxes.get(worker) is outbox:
                        self._take(worker, outbox, header, payload)
        finally:
            outbox.close()
            with self._lock:
                if self._outboxes.get(worker) is outbox:
                    del self._outboxes[worker]
                    self._take(worker, None, {"op": "lost"}, NO_NUMBERS)

    def _take(
        self, worker: int, outbox: Outbox | None, header: Mapping[str, Any], payload: Tensor
    ) -> None:
        """Process a message. outbox: outbox for the reply. Must be called under the lock."""
        had_weights = self._served.has_weights
        answer = self._served.answer(worker, header, payload)
        if not had_weights:
            self._note_beginning()
        if self._log is not None and header["op"] != "state":
            self._log.add({**header, "worker": worker}, payload)
            if self._served.is_finished:
                self._log.end()
        if answer.header is not None and outbox is not None:
            outbox.put(answer)
        for other, batch in answer.dispatches:
            # Skip workers that have not reconnected since a server was lost; they will resend their
            # requests.
            if other in self._outboxes:
                self._outboxes[other].put(ShardAnswer({"batch": batch}))
        self._lock.notify_all()

    def _note_beginning(self) -> None:
        self.began_at, self.sent_before = self.version, self.sent_bytes


def serve(
    document: spec.JobSpec,
    index: int,
    rendezvous: RendezvousHandler,
    page: HeartbeatPage,
    address: str,
) -> None:
    """Run the server with this index until the job is done. address: address of this node.

    Raises ConnectionLost if this process replaces a server whose replica is also lost.
    """
    sync = document.sync
    assert isinstance(sync, spec.ParameterServer)
    num_workers = document.resources.num_workers - sync.servers
    store = rendezvous.meet_without_group()
    generation = rendezvous.assignment.generation
    server = ShardServer(index, num_workers, document, generation=generation)
    if generation > 0:
        try:
            snapshot = taken_over(store, index, sync.servers, generation)
        except ConnectionLost:
            if store.check([FINISHED_KEY]):
                return
            raise
        if snapshot is not None:
            server.take_over(snapshot)
    report = SentReport(server)
    with listening(store, key_of(index), address, server.serve):
        server.replicate(store)
        page.enter(RankPhase.EXCHANGE, TimeCategory.USEFUL)
        page.begin(generation, server.version)
        is_over, look_at = False, 0.0
        while not is_over:
            is_over = server.is_over(
                SHOW_S
            )  # before the report, so that the last steps are included
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + FINISHED_LOOK_S
                if store.check([FINISHED_KEY]):
                    server.finish()
            if server.version > server.began_at:
                page.commit(server.version)
                report.look()


class SentReport:
    """Reports `perf/sent_bytes` of a server, averaged over the steps since the last report."""

    def __init__(self, server: ShardServer) -> None:
        self._server = server
        self._step: int | None = None
        self._sent = 0

    def look(self) -> None:
        server = self._server
        step, sent = server.version, server.sent_bytes
        if self._step is None:
            self._step, self._sent = server.began_at, server.sent_before
        if step > self._step:
            train.report(step, {SENT_BYTES: (sent - self._sent) / (step - self._step)})
            self._step, self._sent = step, sent
