"""Replicas of parameter servers: no update is lost or counted twice, regardless of which process
dies."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import random
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dray import spec
from dray.spec import JobSpec
from dray.train.kv.connection import ConnectionLost, connect, listening
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.training.core.compat_torch import TCPStore
from ray_workers.training.core.progress import FINISHED_KEY
from ray_workers.training.elastic.store_server import loopback_store
from ray_workers.training.parallel.parameter_server.replication import (
    ReplicaHolder,
    Superseded,
    key_of,
    taken_over,
)
from ray_workers.training.parallel.parameter_server.served_shard import ServedShard
from ray_workers.training.parallel.parameter_server.server import ShardServer, serve
from ray_workers.training.parallel.parameter_server.shard import ShardSnapshot
from tests.marks import ONE_SET

NUM_WORKERS, NUM_BATCHES = 3, 9
LR, MOMENTUM, STRENGTH = 0.05, 0.9, 0.5
PATIENCE_S = 60.0
LOOPBACK = "127.0.0.1"
SIZES = [2, 1, 1]
"""Sizes of decayed weights, other weights, and buffers; there is no weight decay."""
START = torch.tensor([1.0, -2.0, 0.5, 0.0])
MOVES = [45, 40, 7, 3, 5]
"""Relative frequencies: a worker sends, the replica processes a message, the server, the replica,
or a worker dies."""
NOTHING = torch.empty(0, dtype=torch.uint8)
STALENESS_LR = spec.Correction(name="staleness_lr")
COMPENSATED = spec.Correction(name="delay_compensation", strength=STRENGTH)


def document(mode: str = "asynchronous", **sync: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "recipe": "image_classification",
            "train": {
                "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0}
            },
            "resources": {"num_workers": NUM_WORKERS + 2},
            "sync": {
                "kind": "parameter_server",
                "servers": 2,
                "mode": mode,
                "shards_kept_by": "replica",
                **sync,
            },
        }
    )


def served(asked: JobSpec, *, is_replica: bool = False) -> ServedShard:
    return ServedShard(0, NUM_WORKERS, asked, is_replica=is_replica)


def beginning(last: int = NUM_BATCHES) -> dict[str, Any]:
    header = {"op": "begin", "sizes": SIZES, "tensors": [["values", [4]]], "done": [0, []]}
    return {**header, "last": last, "next": 1, "again": [], "notes": {"settled": 0}}


def as_sent(snapshot: ShardSnapshot) -> ShardSnapshot:
    """Return the message as it is received over a connection."""
    tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    return ShardSnapshot(json.loads(json.dumps(snapshot.about)), tensors)


# A game of messages, replication, and deaths, compared with the equations.


@dataclass
class Worker:
    """One process of a worker, which knows the replies that it has received."""

    is_there: bool = False
    done: int | None = None
    weights: Tensor | None = None
    pulled_version: int = 0
    batch: int | None = None
    asks: dict[str, Any] | None = None
    """The message that has no reply yet."""
    payload: Tensor = field(default_factory=lambda: NOTHING)
    is_sent: bool = False
    """Whether it was sent to the server that is currently alive."""
    is_over: bool = False


class Game:
    """One server, its replica on another, and workers. A message is sent, processed, replicated,
    and answered in separate moves, between which either server or any worker can die."""

    def __init__(self, asked: JobSpec, equations: Equations) -> None:
        self.asked = asked
        self.equations = equations
        self.server = served(asked)
        self.replica: ServedShard | None = None
        self.workers = {worker: Worker() for worker in range(NUM_WORKERS)}
        self.log: deque[tuple[dict[str, Any], Tensor, list[tuple[Worker, Any, Any]]]] = deque()
        """(message, payload, replies that wait until the replica has it, as (process, header,
        weights))."""
        self._take(0, beginning(), START.view(torch.uint8))

    def _take(self, worker: int, header: dict[str, Any], payload: Tensor) -> None:
        answer = self.server.answer(worker, header, payload)
        weights = answer.tensors[0].clone() if answer.tensors else None
        there = self.workers
        answers = [] if answer.header is None else [(there[worker], dict(answer.header), weights)]
        answers += [(there[other], {"batch": batch}, None) for other, batch in answer.dispatches]
        self.log.append(({**header, "worker": worker}, payload, answers))

    def replicate(self) -> None:
        """Make the replica process the oldest message that it lacks, or if it is lost, start a new
        one from the server's state."""
        if self.replica is None:
            self.replica = served(self.asked, is_replica=True)
            self.replica.restore(as_sent(self.server.snapshot()))
            taken = list(self.log)
            self.log.clear()
        elif self.log:
            taken = [self.log.popleft()]
            self.replica.answer(taken[0][0]["worker"], taken[0][0], taken[0][1])
        else:
            return
        for header, _, answers in taken:
            self.equations.follow(header)
            for worker, answer, weights in answers:
                self._answer(worker, answer, weights)

    def _answer(self, worker: Worker, answer: Mapping[str, Any], weights: Tensor | None) -> None:
        if not worker.is_sent or worker.asks is None:
            return  # its connection is gone
        asked, worker.asks = worker.asks, None
        match asked["op"]:
            case "hello":
                worker.is_there = True
            case "take":
                worker.batch, worker.done = answer["batch"], None
                worker.is_over = worker.batch is None
            case "pull":
                worker.weights, worker.pulled_version = weights, answer["version"]
            case "push":
                worker.done, worker.weights, worker.batch = worker.batch, None, None

    def send(self, number: int) -> None:
        """Make a worker send its next message, or repeat the one to which it has no reply."""
        worker = self.workers[number]
        if worker.is_over or (worker.asks is not None and worker.is_sent):
            return
        if worker.asks is None:
            worker.asks, worker.payload = self._next(worker), NOTHING
            if worker.asks["op"] == "push":
                worker.payload = gradient_of(worker).view(torch.uint8)
                self.equations.expect(number, worker)
        elif worker.is_there:
            self._take(number, {"op": "hello", "fingerprint": "", "comes_back": True}, NOTHING)
            self.log[-1][2].clear()  # the greeting is read separately
        worker.is_sent = True
        self._take(number, worker.asks, worker.payload)

    def _next(self, worker: Worker) -> dict[str, Any]:
        if not worker.is_there:
            return {"op": "hello", "fingerprint": "", "comes_back": False}
        if worker.batch is None:
            return {"op": "take", "done": worker.done}
        if worker.weights is None:
            return {"op": "pull", "version": None}
        return {"op": "push", "batch": worker.batch, "lr": LR, "loss": 0.0}

    def lose_worker(self, number: int) -> None:
        """Replace the worker with a new process, which starts with a hello message."""
        if self.workers[number].is_sent:
            self._take(number, {"op": "lost"}, NOTHING)
        self.workers[number] = Worker()

    def lose_server(self) -> None:
        """Everything that the replica lacks, and everything without a reply, is lost with the
        server."""
        if self.replica is None:
            return  # both are lost, and the attempt ends
        self.server = served(self.asked)
        self.server.restore(as_sent(self.replica.snapshot()))
        self._begin_anew()

    def lose_replica(self) -> None:
        self.replica = None

    def _begin_anew(self) -> None:
        self.log.clear()
        self.replica = None
        for worker in self.workers.values():
            worker.is_sent = False

    def to_the_end(self) -> None:
        for _ in range(20 * NUM_BATCHES * NUM_WORKERS):
            if self.workers[0].is_over:
                break
            for number in self.workers:
                self.send(number)
            while self.log or self.replica is None:
                self.replicate()
        assert self.workers[0].is_over, "the chief learns that no batch is left"


def gradient_of(worker: Worker) -> Tensor:
    """Return a gradient that depends on the batch and on the weights that the worker has pulled."""
    assert worker.batch is not None
    assert worker.weights is not None
    slope = torch.linspace(0.1, 0.4, 4) * worker.batch
    return 0.1 * worker.weights + slope


class Equations:
    """The updates in plain tensor code, in the order in which the replica gets them."""

    def __init__(self, correction: spec.Correction | None) -> None:
        self._correction = correction
        self.weights = START.clone()
        self._velocity = torch.zeros(3)
        self.batches: list[int] = []
        self._expected: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}

    def expect(self, number: int, worker: Worker) -> None:
        assert worker.batch is not None
        assert worker.weights is not None
        pushed = (gradient_of(worker), worker.weights, worker.pulled_version)
        self._expected[number, worker.batch] = pushed

    def follow(self, header: Mapping[str, Any]) -> None:
        if header["op"] != "push" or header["batch"] in self.batches:
            return
        gradient, pulled, version = self._expected[header["worker"], header["batch"]]
        own, change, lr = gradient[:3], gradient[3:], LR
        if self._correction is STALENESS_LR:
            lr /= max(1, len(self.batches) - version)
        if self._correction is COMPENSATED:
            own = own + STRENGTH * own * own * (self.weights[:3] - pulled[:3])
        self._velocity = MOMENTUM * self._velocity + own
        moved = self.weights[:3] - lr * self._velocity
        self.weights = torch.cat([moved, self.weights[3:] + change])
        self.batches.append(header["batch"])


def drawn(seed: int) -> list[tuple[str, int]]:
    """Return random moves, many of which are deaths."""
    draw = random.Random(seed)
    kinds = draw.choices(["send", "replicate", "server", "replica", "worker"], MOVES, k=150)
    return [(kind, draw.randrange(NUM_WORKERS)) for kind in kinds]


@ONE_SET
@pytest.mark.parametrize("correction", [None, STALENESS_LR, COMPENSATED])
def test_no_update_is_lost_or_counted_twice_whoever_dies_when(
    correction: spec.Correction | None,
) -> None:
    asked = document(correction=None if correction is None else correction.model_dump())
    for seed in range(40):
        game = play(asked, Equations(correction), drawn(seed))
        assert sorted(game.equations.batches) == list(range(1, NUM_BATCHES + 1)), seed
        values = game.server.snapshot().tensors["values"]
        torch.testing.assert_close(values, game.equations.weights, atol=1e-6, rtol=0)


def play(asked: JobSpec, equations: Equations, moves: list[tuple[str, int]]) -> Game:
    game = Game(asked, equations)
    for move, number in moves:
        match move:
            case "send":
                game.send(number)
            case "replicate":
                game.replicate()
            case "server":
                game.lose_server()
            case "replica":
                game.lose_replica()
            case "worker":
                game.lose_worker(number)
    game.to_the_end()
    return game


# Threads: a worker that does not read.


class Peer:
    """A worker's connection on the side of a server."""

    def __init__(self, worker: int) -> None:
        self._asked: queue.Queue[tuple[dict[str, Any], Tensor] | None] = queue.Queue()
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.reads = threading.Event()
        self.tell({"worker": worker, "fingerprint": "", "comes_back": False})

    def tell(self, header: dict[str, Any], payload: Tensor = NOTHING) -> None:
        self._asked.put((header, payload))

    def ask(self, header: dict[str, Any], payload: Tensor = NOTHING) -> dict[str, Any]:
        self.tell(header, payload)
        return self.answers.get(timeout=PATIENCE_S)

    # The server's side.

    def receive(self) -> tuple[dict[str, Any], Tensor]:
        message = self._asked.get()
        if message is None:
            raise ConnectionLost
        return message

    def send(self, header: Mapping[str, Any], *payload: Tensor) -> None:
        self.reads.wait()
        self.answers.put(dict(header))

    def close(self) -> None:
        self.reads.set()
        self._asked.put(None)


def join(server: ShardServer, worker: int, *, reads: bool) -> Peer:
    peer = Peer(worker)
    if reads:
        peer.reads.set()
    threading.Thread(target=serve_quietly, args=(server, peer), daemon=True).start()
    return peer


def serve_quietly(server: ShardServer, peer: Any) -> None:
    with contextlib.suppress(ConnectionLost):
        server.serve(peer)


def test_a_worker_that_does_not_read_holds_up_nobody() -> None:
    server = ShardServer(0, NUM_WORKERS, document(shards_kept_by="snapshot"))
    chief = join(server, 0, reads=True)
    assert not chief.answers.get(timeout=PATIENCE_S)["is_ready"]
    chief.ask(beginning(), START.view(torch.uint8))
    deaf = join(server, 1, reads=False)
    for header in ({"op": "take", "done": None}, {"op": "pull", "version": None}, {"op": "state"}):
        deaf.tell(header)
    gradient, done = torch.ones(4).view(torch.uint8), None
    for _ in range(NUM_BATCHES - 1):
        done = chief.ask({"op": "take", "done": done})["batch"]
        chief.ask({"op": "pull", "version": None})
        push = {"op": "push", "batch": done, "lr": LR, "loss": 0.0}
        assert chief.ask(push, gradient)["counts"]
    other = join(server, 2, reads=True)
    assert other.answers.get(timeout=PATIENCE_S)["version"] == NUM_BATCHES - 1
    deaf.reads.set()
    found = [deaf.answers.get(timeout=PATIENCE_S) for _ in range(4)]
    assert [sorted(each)[0] for each in found] == ["is_ready", "batch", "loss", "done"]
    for peer in (chief, deaf, other):
        peer.close()
    assert not server.is_over(0.0)


def test_an_answer_waits_until_the_replica_has_its_message() -> None:
    store = loopback_store()
    server = ShardServer(0, NUM_WORKERS, document())
    chief = join(server, 0, reads=True)
    with pytest.raises(queue.Empty):
        chief.answers.get(timeout=0.05)
    keeper = ShardServer(1, NUM_WORKERS, document())
    with listening(store, key_of(1), LOOPBACK, keeper.serve):
        server.replicate(store)
        assert not chief.answers.get(timeout=PATIENCE_S)["is_ready"]
        chief.ask(beginning(), START.view(torch.uint8))
        batch = chief.ask({"op": "take", "done": None})["batch"]
        push = {"op": "push", "batch": batch, "lr": LR, "loss": 0.0}
        assert chief.ask(push, torch.ones(4).view(torch.uint8))["counts"]
        chief.ask({"op": "finish"})
        assert server.version == 1
        store.set(FINISHED_KEY, "1")
    chief.close()


def test_a_server_whose_replica_is_lost_too_does_not_begin_anew() -> None:
    store = loopback_store()
    keeper = ShardServer(1, NUM_WORKERS, document(), generation=1)
    with (
        listening(store, key_of(1), LOOPBACK, keeper.serve),
        pytest.raises(ConnectionLost, match="the shard of server 0 is lost"),
    ):
        taken_over(store, 0, 2, 1)


def test_a_server_that_had_no_weights_yet_is_replaced_by_one_without() -> None:
    store = loopback_store()
    keeper = ShardServer(1, NUM_WORKERS, document())
    with listening(store, key_of(1), LOOPBACK, keeper.serve):
        assert taken_over(store, 0, 2, 1) is None
    store.set(FINISHED_KEY, "1")
    with pytest.raises(ConnectionLost, match="training has ended"):
        taken_over(store, 0, 2, 1)


def test_an_error_in_a_thread_ends_the_server() -> None:
    server = ShardServer(0, NUM_WORKERS, document(shards_kept_by="snapshot"))
    chief = join(server, 0, reads=True)
    chief.tell({"op": "nonsense"})
    with pytest.raises(AssertionError, match="nonsense"):
        server.is_over(PATIENCE_S)


def test_a_server_that_was_taken_for_lost_and_goes_on_is_kept_out() -> None:
    """It was stopped but not dead: none of its messages are accepted any more, and it ends."""
    store = loopback_store()
    keeper, old = ShardServer(1, NUM_WORKERS, document()), ShardServer(0, NUM_WORKERS, document())
    with listening(store, key_of(1), LOOPBACK, keeper.serve):
        old.replicate(store)
        chief = join(old, 0, reads=True)
        chief.answers.get(timeout=PATIENCE_S)
        chief.ask(beginning(), START.view(torch.uint8))
        snapshot = taken_over(store, 0, 2, 1)
        assert snapshot is not None
        with pytest.raises(Superseded):
            old.is_over(PATIENCE_S)
        new = ShardServer(0, NUM_WORKERS, document(), generation=1)
        new.take_over(snapshot)
        new.replicate(store)
        assert join(new, 0, reads=True).answers.get(timeout=PATIENCE_S)["is_ready"]
        chief.tell({"op": "take", "done": None})
        with pytest.raises(queue.Empty):
            chief.answers.get(timeout=0.05)
        store.set(FINISHED_KEY, "1")
    chief.close()


def test_a_next_server_that_is_new_too_follows_the_newest_process() -> None:
    holder = ReplicaHolder(lambda: served(document(), is_replica=True), is_newcomer=True)
    snapshot = served(document()).snapshot()
    old, new = Listened(), Listened()
    for generation, connection in ((0, old), (1, new)):
        hello = {"generation": generation, "about": snapshot.about, "tensors": []}
        threading.Thread(
            target=follow_quietly, args=(holder, connection, hello), daemon=True
        ).start()
        assert connection.answers.get(timeout=PATIENCE_S) == {"is_superseded": False}
    assert old.is_closed.wait(PATIENCE_S)
    new.close()


class Listened:
    """A connection that receives no message before it is closed."""

    def __init__(self) -> None:
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.is_closed = threading.Event()

    def send(self, header: Mapping[str, Any]) -> None:
        self.answers.put(dict(header))

    def receive(self) -> Any:
        self.is_closed.wait()
        raise ConnectionLost

    def close(self) -> None:
        self.is_closed.set()


def follow_quietly(holder: ReplicaHolder, connection: Any, hello: Mapping[str, Any]) -> None:
    with contextlib.suppress(ConnectionLost):
        holder.follow(connection, hello, NOTHING)


def test_a_server_ends_with_the_job_though_the_chief_was_lost_before_it_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is stored; its replacement discovers this, and that there is nothing left to
    do."""
    monkeypatch.setattr(f"{serve.__module__}.FINISHED_LOOK_S", 0.0)
    store = loopback_store()
    assignment = RankAssignment(0, NUM_WORKERS, NUM_WORKERS + 2, None)
    own = TCPStore(LOOPBACK, store.port, wait_for_workers=False)  # one waits while the other sets
    rendezvous: Any = SimpleNamespace(assignment=assignment, meet_without_group=lambda: own)
    asked = document(shards_kept_by="snapshot")
    given = (asked, 0, rendezvous, HeartbeatPage(None), LOOPBACK)
    serving = threading.Thread(target=serve, args=given, daemon=True)
    serving.start()
    chief, worker = (connect(store, key_of(0)) for _ in range(2))
    for number, each in enumerate((chief, worker)):
        each.send({"worker": number, "fingerprint": "", "comes_back": False})
        each.receive()
    chief.send(beginning(last=0), START)
    chief.receive()
    worker.send({"op": "take", "done": None})
    chief.close()
    store.set(FINISHED_KEY, "0")
    assert worker.receive()[0] == {"batch": None}
    worker.close()
    serving.join(PATIENCE_S)
    assert not serving.is_alive()


def test_a_connection_that_could_not_be_accepted_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [OSError(errno.EMFILE, "no descriptor is left")]

    class Full(socket.socket):
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return super().accept()

    def created(*given: Any, **options: Any) -> Full:
        return Full(fileno=create(*given, **options).detach())

    store, create = loopback_store(), socket.create_server
    monkeypatch.setattr(socket, "create_server", created)
    monkeypatch.setattr(f"{connect.__module__}.ACCEPT_PAUSE_S", 0.0)
    with listening(store, key_of(0), LOOPBACK, lambda each: each.send({})):
        connected = connect(store, key_of(0))
        assert connected.receive()[0] == {}
        connected.close()
