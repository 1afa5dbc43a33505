"""A server of the key-value store, with one thread per worker and one lock for the values."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dray.train.kv.compression import unpacked_two_bit
from dray.train.kv.connection import TensorConnection, listening
from dray.train.kv.shard import Answers, KeyValueShard, KVError


def key_of(server: int) -> str:
    """Return the key under which the attempt's store contains a server's address and secret."""
    return f"dray-kv-server-{server}"


class KVServer:
    """Serves workers until all of them have disconnected."""

    def __init__(self, num_workers: int, *, is_synchronous: bool) -> None:
        self._shard = KeyValueShard(num_workers, is_synchronous=is_synchronous)
        self._num_to_come = num_workers
        self._num_there = 0
        self._changed = threading.Condition()
        self._answers: dict[int, Tensor | None] = {}
        """Responses to waiting workers, keyed by worker."""

    def wait(self) -> None:
        """Wait until all workers have connected and disconnected."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_to_come and not self._num_there)

    def serve(self, connection: TensorConnection) -> None:
        """Serve one worker until it disconnects."""
        worker = int(connection.receive()[0]["worker"])
        with self._changed:
            self._num_to_come -= 1
            self._num_there += 1
        try:
            while True:
                header, payload = connection.receive()
                try:
                    answer = self._answer(worker, header, payload)
                except (KVError, RuntimeError, TypeError, ValueError) as error:
                    connection.send({"error": str(error)})
                else:
                    connection.send({}, *(() if answer is None else (answer,)))
        finally:
            with self._changed:
                self._num_there -= 1
                self._changed.notify_all()

    def _answer(self, worker: int, header: Mapping[str, Any], payload: Tensor) -> Tensor | None:
        with self._changed:
            shard = self._shard
            match header["op"]:
                case "init":
                    value = payload.view(torch.float32).view(header["shape"])
                    shard.init(header["key"], value)
                case "optimizer":
                    shard.set_optimizer(header["name"], header["options"])
                case "push":
                    self._deliver(shard.push(worker, header["key"], _gradient(header, payload)))
                case "pull":
                    rows = payload.view(torch.int64) if header["has_rows"] else None
                    self._deliver(shard.pull(worker, header["key"], rows))
                    return self._delivered(worker)
                case "barrier":
                    self._deliver(shard.barrier(worker))
                    return self._delivered(worker)
        return None

    def _deliver(self, answers: Answers) -> None:
        self._answers |= dict(answers)
        if answers:
            self._changed.notify_all()

    def _delivered(self, worker: int) -> Tensor | None:
        self._changed.wait_for(lambda: worker in self._answers)
        return self._answers.pop(worker)


def _gradient(header: Mapping[str, Any], payload: Tensor) -> Tensor:
    shape = torch.Size(header["shape"])
    match header["form"]:
        case "fp32":
            return payload.view(torch.float32).view(shape)
        case "fp16":
            return payload.view(torch.float16).float().view(shape)
        case "2bit":
            return unpacked_two_bit(payload, shape, header["threshold"])
        case "rows":
            at = header["num_rows"] * torch.int64.itemsize
            rows, values = payload[:at].view(torch.int64), payload[at:].view(torch.float32)
            values = values.view(header["num_rows"], *shape[1:])
            return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=False)
        case form:
            raise KVError(f"unknown gradient format {form!r}")


def serve(store: Any, address: str, server: int, num_workers: int, *, is_synchronous: bool) -> None:
    """Serve until all workers have disconnected. store: the attempt's torch store. address: an
    address of this node."""
    serving = KVServer(num_workers, is_synchronous=is_synchronous)
    with listening(store, key_of(server), address, serving.serve):
        serving.wait()
