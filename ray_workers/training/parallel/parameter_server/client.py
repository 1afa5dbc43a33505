"""The worker's side of the connections to all servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from dray import spec
from dray.train.kv.connection import (
    DTYPES,
    ConnectionLost,
    connect,
    shapes_of,
    unpacked,
)
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.parallel.parameter_server.layout import FlatLayout
from ray_workers.training.parallel.parameter_server.replication import key_of, reconnect
from ray_workers.training.parallel.parameter_server.shard import DoneBatches, Pushed


@dataclass(frozen=True)
class Pulled:
    """The weights from all servers, as a vector in the order of the layout."""

    version: int
    """The version of server 0."""
    vector: Tensor
    loss: float
    squares: float


@dataclass(frozen=True)
class ServersState:
    """The state of all servers."""

    tensors: Mapping[str, Tensor]
    """`values`, and the optimizer state. The optimizer state consists of scalars, and of vectors
    that lack the segment of buffers."""
    done: Sequence[DoneBatches]
    """The batches that each server has completed."""
    staleness: Mapping[int, int]
    """Number of updates for each staleness, as counted by server 0."""
    moved_bytes: int
    """Bytes of weights and gradients sent between servers and workers since the servers started."""


class ServerLink:
    """A connection to one server. Every message has a reply. If the server is lost and has a
    replica, the message is resent to the server's replacement. A resent message is processed only
    once."""

    def __init__(
        self, store: Store, server: int, hello: Mapping[str, Any], *, has_replica: bool
    ) -> None:
        self._store = store
        self._server = server
        self._hello = hello
        self._has_replica = has_replica
        self._asked: tuple[Mapping[str, Any], Sequence[Tensor]] = ({}, ())
        self._connection = (
            reconnect(store, server) if has_replica else connect(store, key_of(server))
        )
        self._sent_before = 0
        """Number of bytes sent over connections that were lost."""

    @property
    def sent_bytes(self) -> int:
        return self._sent_before + self._connection.sent_bytes

    def greet(self) -> dict[str, Any]:
        """Introduce this worker to a server on the first connection, and return the reply."""
        return self.ask({**self._hello, "comes_back": False})

    def ask(self, header: Mapping[str, Any], *payload: Tensor) -> dict[str, Any]:
        """Send a message, and return the header of the reply."""
        self.send(header, *payload)
        return self.receive()[0]

    def send(self, header: Mapping[str, Any], *payload: Tensor) -> None:
        self._asked = (header, payload)
        try:
            self._connection.send(header, *payload)
        except ConnectionLost as error:
            self._come_back(error)

    def receive(self) -> tuple[dict[str, Any], Tensor]:
        while True:
            try:
                found = self._connection.receive()
            except ConnectionLost as error:
                self._come_back(error)
            else:
                self._asked = ({}, ())
                return found

    def close(self) -> None:
        self._connection.close()

    def _come_back(self, error: ConnectionLost) -> None:
        """Resend the message to the replacement of the lost server."""
        if not self._has_replica:
            raise error
        header, payload = self._asked
        while True:
            self._sent_before += self._connection.sent_bytes
            self._connection.close()
            self._connection = reconnect(self._store, self._server)
            try:
                if "comes_back" not in header:
                    self._connection.send({**self._hello, "comes_back": True})
                    self._connection.receive()
                self._connection.send(header, *payload)
            except ConnectionLost:
                continue
            return


class Servers:
    """The connections to all servers. Server 0 assigns the batches."""

    def __init__(
        self, layout: FlatLayout, links: Sequence[ServerLink], sync: spec.ParameterServer
    ) -> None:
        self._layout = layout
        self._push_dtype = DTYPES[sync.push_dtype]
        correction = sync.correction
        self._asks_staleness = correction is not None and correction.name == "staleness_lr"
        self._links = links
        self.is_ready = False
        """Whether the servers already had weights when this worker connected."""
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
        sync: spec.ParameterServer,
    ) -> Self:
        """Wait for all servers and connect to them. fingerprint: hash of the worker's data."""
        store.wait([key_of(server) for server in range(sync.servers)], limit)
        hello = {"worker": worker, "fingerprint": fingerprint}
        has_replica = sync.shards_kept_by == "replica"
        links = [
            ServerLink(store, server, hello, has_replica=has_replica)
            for server in range(sync.servers)
        ]
        servers = cls(layout, links, sync)
        answers = [link.greet() for link in links]
        servers.is_ready = all(answer["is_ready"] for answer in answers)
        servers.version, servers.notes = answers[0]["version"], answers[0]["notes"]
        servers.is_same_data = answers[0]["is_same"]
        return servers

    def sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in self._links)

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        done: Sequence[DoneBatches],
        last_batch: int,
        notes: Mapping[str, Any],
    ) -> None:
        """Send the servers their initial state. tensors: as in `ServersState`."""
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
        # Send the state of server 0 last, because workers start as soon as server 0 has replied.
        for server in reversed(range(len(asked))):
            about, parts = asked[server]
            self._links[server].ask(about, *parts)

    def take(self, done: int | None) -> int | None:
        """Wait until a batch is assigned, and return its number; None if no batches are left. done:
        the last batch whose gradient has been sent to all servers."""
        batch: int | None = self._links[0].ask({"op": "take", "done": done})["batch"]
        return batch

    def push(self, batch: int, lr: float, loss: float, vector: Tensor) -> Pushed:
        """Send all servers their parts of a gradient, and return the reply of server 0.

        If the learning rate depends on the staleness, server 0 receives its part first, and returns
        the staleness. The other servers receive this staleness with their parts, so that all parts
        of the gradient are applied with the same rate.
        """
        header: dict[str, Any] = {"op": "push", "batch": batch, "lr": lr, "loss": loss}
        vector = vector.to(self._push_dtype)
        parts = [self._layout.part(vector, server) for server in range(len(self._links))]
        if not self._asks_staleness:
            return Pushed(**self._ask([header] * len(parts), parts)[0][0])
        pushed = Pushed(**self._links[0].ask(header, *parts[0]))
        others = {**header, "staleness": pushed.staleness}
        self._ask([others] * (len(parts) - 1), parts[1:], first=1)
        return pushed

    def pull(self, version: int | None) -> Pulled:
        """Return the weights of this version, or the latest weights if `version` is None."""
        answers = self._ask([{"op": "pull", "version": version}] * len(self._links))
        vector = self._layout.joined([payload.view(torch.float32) for _, payload in answers])
        squares = sum(header["squares"] for header, _ in answers)
        first = answers[0][0]
        return Pulled(first["version"], vector, first["loss"], squares)

    def state(self) -> ServersState:
        """Return the state of all servers. The servers' states are from slightly different
        times."""
        answers = self._ask([{"op": "state"}] * len(self._links))
        parts = [unpacked(header["tensors"], payload) for header, payload in answers]
        # A shard has no optimizer state before its first step.
        names = [name for name in parts[0] if all(name in part for part in parts)]
        tensors = {name: self._whole([part[name] for part in parts]) for name in names}
        headers = [header for header, _ in answers]
        done = [DoneBatches(h["done"][0], set(h["done"][1])) for h in headers]
        moved_bytes = sum(header["moved_bytes"] for header in headers)
        return ServersState(tensors, done, dict(headers[0]["staleness"]), moved_bytes)

    def note(self, notes: Mapping[str, Any]) -> None:
        """On server 0, store the chief's state except for the weights."""
        self._links[0].ask({"op": "note", "notes": dict(notes)})

    def stop(self) -> None:
        """Make server 0 stop assigning batches, because the training ends early."""
        self._links[0].ask({"op": "stop"})

    def finish(self) -> None:
        """Allow workers and servers to exit after the result has been stored."""
        self._ask([{"op": "finish"}] * len(self._links))

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _ask(
        self,
        headers: Sequence[Mapping[str, Any]],
        payloads: Sequence[Sequence[Tensor]] = (),
        first: int = 0,
    ) -> list[tuple[dict[str, Any], Tensor]]:
        """Send a message to each server, starting with server `first`, and then receive the
        replies."""
        links = self._links[first:]
        for index, link in enumerate(links):
            link.send(headers[index], *(payloads[index] if payloads else ()))
        return [link.receive() for link in links]

    def _part(self, tensor: Tensor, server: int) -> Tensor:
        return tensor if tensor.ndim == 0 else torch.cat(self._layout.part(tensor, server))

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if parts[0].ndim == 0 else self._layout.joined(parts)
