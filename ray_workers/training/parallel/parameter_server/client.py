"""A worker's side of the connections to all servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from dray.train.kv.connection import (
    TensorConnection,
    connect,
    shapes_of,
    unpacked,
)
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.parallel.parameter_server.layout import FlatLayout
from ray_workers.training.parallel.parameter_server.server import key_of
from ray_workers.training.parallel.parameter_server.shard import DoneBatches, Pushed


@dataclass(frozen=True)
class Pulled:
    """Weights from all servers, as a vector of the layout."""

    version: int
    """Of server 0."""
    vector: Tensor
    loss: float
    squares: float


@dataclass(frozen=True)
class ServersState:
    """The state of all servers."""

    tensors: Mapping[str, Tensor]
    """`values`, and of the optimizer's state vectors without buffers, or scalars."""
    done: Sequence[DoneBatches]
    """Of each server."""
    staleness: Mapping[int, int]
    """On server 0: staleness, and the number of updates that were so stale."""


class Servers:
    """Connected to all servers, of which server 0 deals the batches out."""

    def __init__(
        self, layout: FlatLayout, connections: Sequence[TensorConnection], push_dtype: torch.dtype
    ) -> None:
        """push_dtype: of gradients on their way."""
        self._layout = layout
        self._push_dtype = push_dtype
        self._connections = connections
        self.is_ready = False
        """Whether the servers had weights when this worker came."""
        self.version = 0
        self.notes: dict[str, Any] = {}
        self.is_same_data = True

    @classmethod
    def connect(
        cls,
        store: Store,
        layout: FlatLayout,
        worker: int,
        fingerprint: str,
        limit: timedelta,
        push_dtype: torch.dtype,
    ) -> Self:
        """Wait until all servers are there. fingerprint: of the worker's data."""
        keys = [key_of(server) for server in range(layout.num_servers)]
        store.wait(keys, limit)
        connections = [connect(store, key) for key in keys]
        servers = cls(layout, connections, push_dtype)
        hello = {"worker": worker, "fingerprint": fingerprint}
        answers = [header for header, _ in servers._ask([hello] * len(keys))]
        servers.is_ready = all(answer["is_ready"] for answer in answers)
        servers.version, servers.notes = answers[0]["version"], answers[0]["notes"]
        servers.is_same_data = answers[0]["is_same"]
        return servers

    def sent_bytes(self) -> int:
        return sum(connection.sent_bytes for connection in self._connections)

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        done: Sequence[DoneBatches],
        last_batch: int,
        notes: Mapping[str, Any],
    ) -> None:
        """Give the servers their first state; the tensors are as in `ServersState`."""
        last = max(each.last for each in done)
        again = sorted({batch for each in done for batch in each.missing(last)})
        asked: list[tuple[Mapping[str, Any], Sequence[Tensor]]] = []
        for server, own_done in enumerate(done):
            own = {name: self._part(tensor, server) for name, tensor in tensors.items()}
            header = {
                "op": "begin",
                "sizes": list(self._layout.sizes_of(server)),
                "tensors": shapes_of(own),
                "done": [own_done.all_up_to, sorted(own_done.above)],
                "last": last_batch,
                "next": last + 1,
                "again": again,
                "notes": dict(notes),
            }
            asked.append((header, list(own.values())))
        # Server 0 is the last, because it lets the workers begin.
        for server in reversed(range(len(asked))):
            self._connections[server].send(asked[server][0], *asked[server][1])
            self._connections[server].receive()

    def take(self, done: int | None) -> int | None:
        """Wait for the number of the next batch; None if there is none left. done: the batch that
        all servers have the gradient of."""
        dealer = self._connections[0]
        dealer.send({"op": "take", "done": done})
        batch: int | None = dealer.receive()[0]["batch"]
        return batch

    def push(self, batch: int, lr: float, loss: float, vector: Tensor) -> Pushed:
        """Give all servers their parts of a gradient; the answer of server 0."""
        header = {"op": "push", "batch": batch, "lr": lr, "loss": loss}
        vector = vector.to(self._push_dtype)
        parts = [self._layout.part(vector, server) for server in range(len(self._connections))]
        answers = self._ask([header] * len(parts), parts)
        return Pushed(**answers[0][0])

    def pull(self, version: int | None) -> Pulled:
        """The newest weights, or those of a version."""
        answers = self._ask([{"op": "pull", "version": version}] * len(self._connections))
        vector = self._layout.joined([payload.view(torch.float32) for _, payload in answers])
        squares = sum(header["squares"] for header, _ in answers)
        first = answers[0][0]
        return Pulled(first["version"], vector, first["loss"], squares)

    def state(self) -> ServersState:
        """The state of all servers, each at a time of its own."""
        answers = self._ask([{"op": "state"}] * len(self._connections))
        parts = [unpacked(header["tensors"], payload) for header, payload in answers]
        # A shard that has not had a step yet has no state of the optimizer.
        names = [name for name in parts[0] if all(name in part for part in parts)]
        tensors = {name: self._whole([part[name] for part in parts]) for name in names}
        headers = [header for header, _ in answers]
        done = [DoneBatches(h["done"][0], set(h["done"][1])) for h in headers]
        return ServersState(tensors, done, dict(headers[0]["staleness"]))

    def note(self, notes: Mapping[str, Any]) -> None:
        """Keep the chief's state besides the weights on server 0."""
        self._connections[0].send({"op": "note", "notes": dict(notes)})
        self._connections[0].receive()

    def stop(self) -> None:
        """No more batches: the training ends early."""
        self._connections[0].send({"op": "stop"})
        self._connections[0].receive()

    def finish(self) -> None:
        """The result is stored: workers and servers may go."""
        self._ask([{"op": "finish"}] * len(self._connections))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _ask(
        self, headers: Sequence[Mapping[str, Any]], payloads: Sequence[Sequence[Tensor]] = ()
    ) -> list[tuple[dict[str, Any], Tensor]]:
        """Send each server its message, and then take their answers."""
        for server, connection in enumerate(self._connections):
            connection.send(headers[server], *(payloads[server] if payloads else ()))
        return [connection.receive() for connection in self._connections]

    def _part(self, tensor: Tensor, server: int) -> Tensor:
        return tensor if tensor.ndim == 0 else torch.cat(self._layout.part(tensor, server))

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if parts[0].ndim == 0 else self._layout.joined(parts)
