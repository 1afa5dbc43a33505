"""A worker's side of the key-value store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from dray.train.kv.compression import TwoBit
from dray.train.kv.connection import TensorConnection, connect
from dray.train.kv.server import key_of, serve
from dray.train.kv.shard import KVError

Kind = Literal["dist_sync", "dist_async"]
MEETING_LIMIT: Final = timedelta(hours=1)
"""Time limit for the servers to start: their nodes may have to install packages first."""
_NO_ROLES = (
    "kv.create() needs a script with the roles `worker` and `server`, for example script: "
    "{entrypoint: train.py, roles: {worker: {num_workers: 2}, server: {num_workers: 1}}}"
)


def create(kind: Kind = "dist_sync") -> KVStore:
    """Return the store in a rank of the role `worker`. A rank of the role `server` serves until all
    workers have disconnected, and then exits.

    dist_sync: pushes to a key are applied once all workers have pushed it. dist_async: each push is
    applied at once.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown store {kind!r}: use {' or '.join(get_args(Kind))}")
    sizes = json.loads(os.environ.get("DRAY_ROLE_SIZES", "{}"))
    if not {"worker", "server"} <= sizes.keys():
        raise KVError(_NO_ROLES)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torch does not list TCPStore in __all__.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, wait_for_workers=False
    )
    number = int(os.environ["ROLE_RANK"])
    if os.environ["ROLE_NAME"] == "server":
        serve(store, address, number, sizes["worker"], is_synchronous=kind == "dist_sync")
        raise SystemExit(0)
    keys = [key_of(server) for server in range(sizes["server"])]
    store.wait(keys, MEETING_LIMIT)
    connections = [connect(store, key) for key in keys]
    return KVStore(kind, number, sizes["worker"], connections)


class KVStore:
    """The values that a job's servers store. Values and gradients are fp32 tensors on the CPU;
    results are copies."""

    def __init__(
        self, kind: Kind, rank: int, num_workers: int, connections: Sequence[TensorConnection]
    ) -> None:
        self._kind = kind
        self._rank = rank
        self._num_workers = num_workers
        self._connections = connections
        for connection in connections:
            connection.send({"worker": rank})
        self._shapes: dict[str, torch.Size] = {}
        self._is_half = False
        self._two_bit: TwoBit | None = None
        self._threshold = 0.0

    @property
    def type(self) -> Kind:
        """The type of the store: `dist_sync` or `dist_async`."""
        return self._kind

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._rank

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def init(self, key: str, value: Tensor) -> None:
        """Set a key to worker 0's value. All workers must call this method; each call waits for the
        calls of the other workers."""
        self._shapes[key] = value.shape
        if self._rank == 0:
            table = _checked(value).reshape(self._table(key))
            parts = [table[start:stop].contiguous() for start, stop in self._bounds(key)]
            headers = [{"op": "init", "key": key, "shape": list(part.shape)} for part in parts]
            self._ask(headers, [[part] for part in parts])
        self.barrier()

    def push(self, key: str, gradient: Tensor) -> None:
        """Send the servers a gradient or, if no optimizer is set, a new value. A sparse tensor,
        such as the gradient of an embedding with `sparse=True`, changes only the rows that it
        contains."""
        shape = self._shape(key)
        if gradient.shape != shape:
            raise KVError(
                f"{key!r} has the shape {list(shape)}, but its gradient has the shape "
                f"{list(gradient.shape)}"
            )
        if gradient.is_sparse:
            self._push_rows(key, gradient.coalesce())
            return
        table = _checked(gradient).reshape(self._table(key))
        headers, payloads = [], []
        for server, (start, stop) in enumerate(self._bounds(key)):
            part = table[start:stop].contiguous()
            form, payload = "fp32", part
            if self._two_bit is not None:
                form, payload = "2bit", self._two_bit.packed(f"{server}/{key}", part)
            elif self._is_half:
                form, payload = "fp16", part.half()
            about = {"form": form, "threshold": self._threshold, "shape": list(part.shape)}
            headers.append({"op": "push", "key": key, **about})
            payloads.append([payload])
        self._ask(headers, payloads)

    def pull(self, key: str, out: Tensor | None = None) -> Tensor:
        """Return the value of a key. With `dist_sync`, this waits until this worker's pushes have
        been applied. out: a tensor to which the value is also copied."""
        shape = self._shape(key)
        headers = [{"op": "pull", "key": key, "has_rows": False}] * len(self._connections)
        value = torch.cat([part.view(torch.float32) for part in self._ask(headers)]).view(shape)
        if out is not None:
            with torch.no_grad():
                out.copy_(value)
        return value

    def pushpull(self, key: str, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Push a gradient, and then pull the value."""
        self.push(key, gradient)
        return self.pull(key, out)

    def row_sparse_pull(self, key: str, row_ids: Tensor) -> Tensor:
        """Return the rows with these indices, in this order. The result has the shape
        (len(row_ids), *shape of a row)."""
        shape, row_ids = self._shape(key), row_ids.reshape(-1).to(torch.int64)
        if not shape:
            raise KVError(f"{key!r} is a single number and has no rows")
        if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < shape[0]:
            raise KVError(f"{key!r} has only the rows 0 to {shape[0] - 1}")
        found = torch.empty((len(row_ids), *shape[1:]))
        masks = [(row_ids >= start) & (row_ids < stop) for start, stop in self._bounds(key)]
        headers = [{"op": "pull", "key": key, "has_rows": True}] * len(masks)
        asked = [
            [row_ids[mask] - start]
            for mask, (start, _) in zip(masks, self._bounds(key), strict=True)
        ]
        for mask, part in zip(masks, self._ask(headers, asked), strict=True):
            found[mask] = part.view(torch.float32).view(-1, *shape[1:])
        return found

    def set_optimizer(self, name: str, **options: Any) -> None:
        """Make the servers apply pushes as gradients, with torch's `sgd`, `adam`, `adamw` or
        `adagrad` and its options, such as `lr=0.1`. All workers must call this method; each call
        waits for the calls of the other workers."""
        if self._rank == 0:
            header = {"op": "optimizer", "name": name, "options": options}
            self._ask([header] * len(self._connections))
        self.barrier()

    def set_gradient_compression(self, options: Mapping[str, Any]) -> None:
        """Send dense gradients in fewer bytes. `{"type": "2bit", "threshold": 0.5}`: send each
        element as -threshold, 0 or threshold, and add the rounding error to the next gradient.
        `{"type": "fp16"}`: send each element as a 16-bit number."""
        kind = options.get("type")
        if kind == "2bit":
            self._threshold = float(options.get("threshold", 0.5))
            if not self._threshold > 0.0:
                raise KVError(f"threshold is {self._threshold:g}, but must be above 0")
            self._two_bit = TwoBit(self._threshold)
        elif kind == "fp16":
            self._is_half = True
        else:
            raise KVError(f"unknown gradient compression {kind!r}: use 2bit or fp16")

    def barrier(self) -> None:
        """Wait until all workers have called this method."""
        self._connections[0].send({"op": "barrier"})
        _checked_answer(self._connections[0])

    def close(self) -> None:
        """Close the connections, which are otherwise closed when the process ends."""
        for connection in self._connections:
            connection.close()

    def _push_rows(self, key: str, gradient: Tensor) -> None:
        if gradient.sparse_dim() != 1:
            raise KVError("a sparse gradient must have one sparse dimension, the rows")
        rows, values = gradient.indices()[0], gradient.values()
        headers, payloads = [], []
        for start, stop in self._bounds(key):
            mask = (rows >= start) & (rows < stop)
            own, table = rows[mask] - start, self._table(key)
            about = {"form": "rows", "num_rows": len(own), "shape": [stop - start, *table[1:]]}
            headers.append({"op": "push", "key": key, **about})
            payloads.append([own, _checked(values[mask]).contiguous()])
        self._ask(headers, payloads)

    def _shape(self, key: str) -> torch.Size:
        try:
            return self._shapes[key]
        except KeyError:
            raise KVError(f"{key!r} has no value: call init() with this key first") from None

    def _table(self, key: str) -> list[int]:
        """Return the shape of a key's value as a table of rows; a single number has one row."""
        shape = self._shapes[key]
        return list(shape) if shape else [1]

    def _bounds(self, key: str) -> list[tuple[int, int]]:
        """Return the range [start, stop) of each server's rows."""
        rows, num = self._table(key)[0], len(self._connections)
        return [(rows * server // num, rows * (server + 1) // num) for server in range(num)]

    def _ask(
        self, headers: Sequence[Mapping[str, Any]], payloads: Sequence[Sequence[Tensor]] = ()
    ) -> list[Tensor]:
        """Send each server its message, then receive the responses of all servers."""
        for server, connection in enumerate(self._connections):
            connection.send(headers[server], *(payloads[server] if payloads else ()))
        answers = [connection.receive() for connection in self._connections]
        for header, _ in answers:
            if "error" in header:
                raise KVError(header["error"])
        return [payload for _, payload in answers]


def _checked(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise KVError(
            f"values must be float32 on the CPU, but this is {tensor.dtype} on {tensor.device}: "
            "use tensor.float().cpu()"
        )
    return tensor.detach()


def _checked_answer(connection: TensorConnection) -> None:
    header, _ = connection.receive()
    if "error" in header:
        raise KVError(header["error"])
