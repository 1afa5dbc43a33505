"""The complete state of a server, as a state machine that maps messages to replies without I/O.

The replies depend only on the messages and their order. Therefore, another server that processes
the same messages in the same order has a replica of the state (Schneider 1990, state machine
replication).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from dray import spec
from dray.train.kv.connection import DTYPES, shapes_of, unpacked
from ray_workers.training.parallel.parameter_server.batch_dispatcher import (
    BatchDispatcher,
    Dispatches,
    SharedBatchDispatcher,
    SynchronousBatchDispatcher,
)
from ray_workers.training.parallel.parameter_server.layout import Sizes
from ray_workers.training.parallel.parameter_server.shard import (
    DoneBatches,
    ParameterShard,
    Push,
    ShardSnapshot,
)

NEED_WEIGHTS: Final = ("push", "take", "pull", "state")
"""Messages that can be answered only after the chief has sent the initial weights."""


@dataclass(frozen=True)
class ShardAnswer:
    """The reply to a message, and the batches assigned as a result of the message."""

    header: Mapping[str, Any] | None
    """None if the worker has to wait until it is assigned a batch."""
    tensors: tuple[Tensor, ...] = ()
    dispatches: tuple[tuple[int, int | None], ...] = ()
    """Assigned batches, as in `batch_dispatcher.Dispatches`."""


class ServedShard:
    """A shard and the rest of its server's state: the workers and, on server 0, the dispatcher."""

    def __init__(
        self, index: int, num_workers: int, document: spec.JobSpec, *, is_replica: bool
    ) -> None:
        """index: index of the server; server 0 also assigns the batches. is_replica: whether this
        is a replica, whose replies are discarded and therefore don't contain weights."""
        assert isinstance(document.sync, spec.ParameterServer)
        self.index = index
        self.is_replica = is_replica
        self._num_workers = num_workers
        self._sync = document.sync
        self._optimizer = document.train.optimizer
        self._shard: ParameterShard | None = None
        self._sizes: list[int] = []
        self._dispatcher: BatchDispatcher | None = None
        self._workers: set[int] = set()
        """The connected workers."""
        self._notes: dict[str, Any] = {}
        """The chief's state except for the weights, for a process that replaces the chief."""
        self._fingerprint: str | None = None
        self.is_finished = False
        self._pulled_bytes = self._pushed_bytes = 0

    @property
    def has_weights(self) -> bool:
        return self._shard is not None

    @property
    def version(self) -> int:
        """Number of batches that the shard's weights include."""
        return 0 if self._shard is None else self._shard.version

    @property
    def sent_bytes(self) -> int:
        """Bytes of pulled weights, and of gradients sent to the replica."""
        copied = self._pushed_bytes if self._sync.shards_kept_by == "replica" else 0
        return self._pulled_bytes + copied

    def answer(self, worker: int, header: Mapping[str, Any], payload: Tensor) -> ShardAnswer:
        """Process a message from a worker. If the worker didn't receive the reply, it may resend
        the message."""
        match header["op"]:
            case "hello":
                return self._hello(worker, header)
            case "lost":
                return self._lost(worker)
            case "begin":
                return self._begin(header, payload)
            case "push":
                return self._push(worker, header, payload)
            case "take":
                assert self._dispatcher is not None
                return ShardAnswer(
                    None, dispatches=tuple(self._dispatcher.take(worker, header["done"]))
                )
            case "pull":
                return self._pull(worker, header["version"])
            case "state":
                return self._state()
            case "note":
                self._notes = dict(header["notes"])
                return ShardAnswer({})
            case "stop":
                return ShardAnswer(
                    {}, dispatches=tuple(self._dispatcher.stop() if self._dispatcher else ())
                )
            case "finish":
                self.is_finished = True
                return ShardAnswer(
                    {}, dispatches=tuple(self._dispatcher.finish() if self._dispatcher else ())
                )
            case op:
                raise AssertionError(f"unknown message {op!r}")

    def _hello(self, worker: int, header: Mapping[str, Any]) -> ShardAnswer:
        """Add a worker that is new, replaces a lost worker, or reconnects after the server was
        lost."""
        dispatches: Dispatches = []
        if header["comes_back"] and worker in self._workers:
            if self._dispatcher is not None:
                self._dispatcher.forget(worker)
        else:
            if self._shard is not None:
                self._shard.lost(worker)
            if self._dispatcher is not None:
                dispatches = self._dispatcher.join(worker)
        self._workers.add(worker)
        self._fingerprint = self._fingerprint or header["fingerprint"]
        about = {
            "is_ready": self.has_weights,
            "version": self.version,
            "notes": self._notes,
            "is_same": self._fingerprint == header["fingerprint"],
        }
        return ShardAnswer(about, dispatches=tuple(dispatches))

    def _lost(self, worker: int) -> ShardAnswer:
        self._workers.discard(worker)
        if self._shard is not None:
            self._shard.lost(worker)
        return ShardAnswer(
            None, dispatches=tuple(self._dispatcher.lost(worker) if self._dispatcher else ())
        )

    def _begin(self, header: Mapping[str, Any], payload: Tensor) -> ShardAnswer:
        """Load the initial weights. A chief that replaces a dead chief might resend the weights."""
        if self._shard is None:
            self._shard = self._shard_of(header["sizes"])
            self._shard.load(
                unpacked(header["tensors"], payload), DoneBatches.of_pair(header["done"])
            )
            self._notes = dict(header["notes"])
            if self.index == 0:
                self._dispatcher = self._dispatcher_of(header)
                for worker in sorted(self._workers):
                    self._dispatcher.join(worker)
        return ShardAnswer({})

    def _shard_of(self, sizes: list[int]) -> ParameterShard:
        self._sizes = sizes
        num_shares = self._num_workers if self._sync.mode == "synchronous" else None
        return ParameterShard(Sizes(*sizes), self._optimizer, num_shares, self._sync.correction)

    def _dispatcher_of(self, about: Mapping[str, Any]) -> BatchDispatcher:
        if self._sync.mode == "synchronous":
            return SynchronousBatchDispatcher(self._num_workers, about["last"], about["next"] - 1)
        return SharedBatchDispatcher(
            about["last"], about["next"], about["again"], self._sync.max_staleness
        )

    def _push(self, worker: int, header: Mapping[str, Any], payload: Tensor) -> ShardAnswer:
        assert self._shard is not None
        self._pushed_bytes += payload.nbytes
        gradient = payload.view(DTYPES[self._sync.push_dtype]).float()
        numbers = header["batch"], header["lr"], header["loss"]
        push = Push(worker, *numbers, gradient, header.get("staleness"))
        return ShardAnswer(vars(self._shard.push(push)))

    def _pull(self, worker: int, version: int | None) -> ShardAnswer:
        assert self._shard is not None
        weights = self._shard.pull(worker, version)
        self._pulled_bytes += weights.values.nbytes
        about = {"version": weights.version, "loss": weights.loss, "squares": weights.squares}
        return ShardAnswer(about, () if self.is_replica else (weights.values.clone(),))

    def _state(self) -> ShardAnswer:
        assert self._shard is not None
        tensors = self._shard.state()
        about = {
            "done": self._shard.done.as_pair(),
            "staleness": sorted(self._shard.staleness.items()),
            "moved_bytes": self.sent_bytes + self._pushed_bytes,
        }
        return ShardAnswer({"tensors": shapes_of(tensors), **about}, tuple(tensors.values()))

    # Methods that exchange the complete state with a replica.

    def snapshot(self) -> ShardSnapshot:
        about: dict[str, Any] = {
            "workers": sorted(self._workers),
            "notes": self._notes,
            "fingerprint": self._fingerprint,
            "is_finished": self.is_finished,
            "bytes": [self._pulled_bytes, self._pushed_bytes],
            "sizes": self._sizes,
            "dealer": None if self._dispatcher is None else self._dispatcher.snapshot(),
            "shard": None,
        }
        if self._shard is None:
            return ShardSnapshot(about, {})
        own = self._shard.snapshot()
        return replace(own, about={**about, "shard": own.about})

    def restore(self, snapshot: ShardSnapshot) -> None:
        """Continue from a snapshot of another server."""
        about = snapshot.about
        self._workers, self._notes = set(about["workers"]), about["notes"]
        self._fingerprint, self.is_finished = about["fingerprint"], about["is_finished"]
        self._pulled_bytes, self._pushed_bytes = about["bytes"]
        if about["shard"] is None:
            return
        self._shard = self._shard_of(about["sizes"])
        self._shard.restore(replace(snapshot, about=about["shard"]))
        if about["dealer"] is not None:
            self._dispatcher = self._dispatcher_of({"next": 1, "again": (), **about["dealer"]})
            self._dispatcher.restore(about["dealer"])
