"""The learning rate of a stale gradient whose parts are on two servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray import spec
from dray.train.kv.connection import shapes_of
from ray_workers.training.parallel.parameter_server.client import Servers
from ray_workers.training.parallel.parameter_server.layout import FlatLayout, flat
from ray_workers.training.parallel.parameter_server.served_shard import ServedShard
from tests.unit.training.jobs import document

LR = 0.5


class Link:
    """The link from one worker to a server in this process, which replies immediately."""

    def __init__(self, server: ServedShard, worker: int) -> None:
        self._server = server
        self._worker = worker
        self._answers: deque[tuple[dict[str, Any], Tensor]] = deque()
        self.before: Callable[[], object] | None = None
        """Called once before the next message."""
        self.ask({"op": "hello", "comes_back": False, "fingerprint": ""})

    def ask(self, header: Mapping[str, Any], *payload: Tensor) -> dict[str, Any]:
        self.send(header, *payload)
        return self.receive()[0]

    def send(self, header: Mapping[str, Any], *payload: Tensor) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()
        vector = torch.cat([each.reshape(-1) for each in payload or (torch.empty(0),)])
        answer = self._server.answer(self._worker, header, vector.view(torch.uint8))
        assert answer.header is not None
        tensors = torch.cat([each.reshape(-1) for each in answer.tensors or (torch.empty(0),)])
        self._answers.append((dict(answer.header), tensors.view(torch.uint8)))

    def receive(self) -> tuple[dict[str, Any], Tensor]:
        return self._answers.popleft()


@pytest.mark.parametrize("correction", ["staleness_lr", None])
def test_all_parts_of_a_gradient_have_the_rate_of_one_staleness(correction: str | None) -> None:
    """Worker 0 pulls from server 0 before three updates by worker 1, and from server 1 after two of
    them, so the servers count 3 and 1."""
    sync: dict[str, Any] = {"kind": "parameter_server", "servers": 2, "mode": "asynchronous"}
    sync |= {"correction": {"name": correction}} if correction else {}
    optimizer = {"name": "sgd", "lr": LR, "momentum": 0.0}
    asked = spec.JobSpec.model_validate(document(4, optimizer=optimizer) | {"sync": sync})
    assert isinstance(asked.sync, spec.ParameterServer)
    layout = FlatLayout(nn.Linear(3, 2), 2)
    shards = [ServedShard(index, 2, asked, is_replica=False) for index in range(2)]
    links: list[list[Any]] = [[Link(each, worker) for each in shards] for worker in range(2)]
    start = flat(layout.tensors)
    for server, shard in enumerate(shards):
        values = {"values": torch.cat(layout.part(start, server))}
        sizes = list(layout.sizes_of(server))
        begin = {"op": "begin", "sizes": sizes, "tensors": shapes_of(values), "done": [0, []]}
        begin |= {"last": 99, "next": 1, "again": [], "notes": {}}
        shard.answer(0, begin, values["values"].view(torch.uint8))
    one, other = (Servers(layout, each, asked.sync) for each in links)

    expected = start.clone()
    gradients = torch.randn(4, len(start), generator=torch.Generator().manual_seed(0))
    one.pull(None)

    def update(batch: int) -> None:
        other.pull(None)
        assert other.push(batch, LR, 0.0, gradients[batch - 1]).lr == LR
        expected.sub_(LR * gradients[batch - 1])

    links[0][1].before = lambda: (update(1), update(2))
    one.pull(None)
    update(3)
    pushed = one.push(4, LR, 0.0, gradients[3])

    assert pushed.staleness == 3
    assert pushed.lr == (LR / 3 if correction else LR)
    expected -= pushed.lr * gradients[3]
    torch.testing.assert_close(other.pull(None).vector, expected, atol=1e-6, rtol=0)
