"""The key-value store for scripts: each operation compared with plain tensor code."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from dray.train import kv
from dray.train.kv.compression import TwoBit, unpacked_two_bit
from dray.train.kv.connection import ConnectionLost, connect, listening
from dray.train.kv.server import KVServer
from dray.train.kv.shard import KVError
from dray.train.kv.store import Kind, KVStore
from tests.unit.training.ranks import Gang, loopback_store, make_task

LR, MOMENTUM = 0.1, 0.9
NUM_WORKERS = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because the tensors are tiny, and threads that wait for each other would take
    a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[list[KVStore]]:
    """Two workers of a store with two servers, all in threads of this process."""
    kind: Kind = getattr(request, "param", "dist_sync")
    at = HashStore()
    with ExitStack() as stack:
        for server in ("0", "1"):
            serving = KVServer(NUM_WORKERS, is_synchronous=kind == "dist_sync")
            stack.enter_context(listening(at, server, "127.0.0.1", serving.serve))
        stores = [
            KVStore(kind, rank, NUM_WORKERS, [connect(at, server) for server in ("0", "1")])
            for rank in range(NUM_WORKERS)
        ]
        yield stores
        for store in stores:
            store.close()


def test_a_listener_that_is_closed_leaves_no_thread_and_no_port() -> None:
    at = HashStore()
    with listening(at, "0", "127.0.0.1", lambda _: None):
        (accepting,) = (one for one in threading.enumerate() if one.name == "dray-accept")
        about = json.loads(at.get("0"))
    accepting.join(60.0)
    assert not accepting.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((about["host"], about["port"]))


def on_all(workers: list[KVStore], do: Callable[[KVStore], Any]) -> list[Any]:
    """Run it on all workers concurrently, and return the results."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(do, workers))


ASYNCHRONOUS = pytest.mark.parametrize("workers", ["dist_async"], indirect=True)


@pytest.mark.parametrize("shape", [(5, 3), (1,), (), (7,)])
def test_without_an_optimizer_the_sum_of_the_pushes_is_the_value(
    workers: list[KVStore], shape: tuple[int, ...]
) -> None:
    start = torch.randn(shape)
    pushed = [torch.randn(shape) for _ in workers]
    on_all(workers, lambda store: store.init("w", start if store.rank == 0 else start + 1))
    assert all(torch.equal(value, start) for value in on_all(workers, lambda s: s.pull("w")))
    values = on_all(workers, lambda store: store.pushpull("w", pushed[store.rank]))
    for value in values:
        torch.testing.assert_close(value, pushed[0] + pushed[1])


@pytest.mark.parametrize(
    ("name", "plain", "options"),
    [
        ("sgd", torch.optim.SGD, {"lr": LR, "momentum": MOMENTUM}),
        ("adamw", torch.optim.AdamW, {"lr": LR}),
    ],
)
def test_with_an_optimizer_the_pushes_are_gradients(
    workers: list[KVStore], name: str, plain: Any, options: dict[str, float]
) -> None:
    start = torch.randn(4, 3)
    gradients = torch.randn(5, 2, 4, 3)

    def train(store: KVStore) -> Tensor:
        store.init("w", start)
        store.set_optimizer(name, **options)
        out = torch.zeros(4, 3)
        for step in gradients:
            store.pushpull("w", step[store.rank], out=out)
        return out

    value = start.clone()
    optimizer = plain([value], **options)
    for step in gradients:
        value.grad = step.sum(0)
        optimizer.step()
    for found in on_all(workers, train):
        torch.testing.assert_close(found, value, atol=1e-6, rtol=0)


@ASYNCHRONOUS
def test_an_asynchronous_push_counts_at_once(workers: list[KVStore]) -> None:
    on_all(workers, lambda store: store.init("w", torch.zeros(3)))
    on_all(workers, lambda store: store.set_optimizer("sgd", lr=1.0))
    workers[1].push("w", torch.ones(3))
    workers[1].push("w", torch.ones(3))
    assert workers[0].pull("w").tolist() == [-2.0] * 3
    assert workers[0].type == "dist_async"


def test_a_pull_waits_until_what_was_pushed_counts(workers: list[KVStore]) -> None:
    on_all(workers, lambda store: store.init("w", torch.zeros(3)))
    workers[0].push("w", torch.ones(3))
    with pytest.raises(KVError, match="pushed twice before all workers"):
        workers[0].push("w", torch.ones(3))
    assert workers[1].pull("w").tolist() == [0.0] * 3, "it has pushed nothing"
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(workers[0].pull, "w")
        workers[1].push("w", torch.ones(3))
        assert pulled.result().tolist() == [2.0] * 3


def test_rows_of_an_embedding_travel_alone(workers: list[KVStore]) -> None:
    start = torch.randn(6, 2)
    rows = [torch.tensor([5, 0]), torch.tensor([0, 3, 3])]
    values = [torch.randn(2, 2), torch.randn(3, 2)]

    def train(store: KVStore) -> Tensor:
        store.init("e", start)
        store.set_optimizer("sgd", lr=LR)
        at = rows[store.rank].unsqueeze(0)
        own = values[store.rank]
        store.push("e", torch.sparse_coo_tensor(at, own, (6, 2), check_invariants=True))
        return store.row_sparse_pull("e", torch.tensor([3, 5, 1, 3]))

    dense = start.clone()
    for at, value in zip(rows, values, strict=True):
        dense.index_add_(0, at, value, alpha=-LR)
    for found in on_all(workers, train):
        torch.testing.assert_close(found, dense[[3, 5, 1, 3]])
    torch.testing.assert_close(workers[0].pull("e"), dense)


@ASYNCHRONOUS
@pytest.mark.parametrize("kind", ["2bit", "fp16"])
def test_compressed_gradients(workers: list[KVStore], kind: str) -> None:
    """With 2bit, the remainder of an element is sent later, so that the sums are correct."""
    store = workers[0]
    on_all(workers, lambda each: each.init("w", torch.zeros(3)))
    on_all(workers, lambda each: each.set_optimizer("sgd", lr=1.0))
    store.set_gradient_compression({"type": kind, "threshold": 0.5})
    for _ in range(10):
        store.push("w", torch.tensor([0.25, -0.125, 1.0]))
    expected = {"2bit": [-2.5, 1.0, -5.0], "fp16": [-2.5, 1.25, -10.0]}
    assert store.pull("w").tolist() == expected[kind]


def test_two_bits_hold_an_element() -> None:
    gradient = torch.tensor([0.6, -0.6, 0.1, 0.0, 2.0])
    packed = TwoBit(0.5).packed("w", gradient)
    assert len(packed) == 2
    found = unpacked_two_bit(packed, gradient.shape, 0.5)
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.pull("x"), "'x' has no value: call init"),
        (lambda store: store.push("w", torch.zeros(4)), r"has the shape \[3\]"),
        (lambda store: store.push("w", torch.zeros(3).double()), "use tensor.float"),
        (lambda store: store.row_sparse_pull("w", torch.tensor([3])), "has only the rows 0 to 2"),
        (lambda store: store.set_gradient_compression({"type": "4bit"}), "use 2bit or fp16"),
        (lambda store: store.set_gradient_compression({"type": "2bit", "threshold": 0}), "above 0"),
        (lambda store: store.set_optimizer("lion"), "unknown optimizer 'lion': use sgd"),
    ],
)
def test_what_can_not_be_is_refused(
    workers: list[KVStore], call: Callable[[KVStore], Any], message: str
) -> None:
    on_all(workers, lambda store: store.init("w", torch.zeros(3)))
    with pytest.raises(KVError, match=message):
        call(workers[0])


def test_a_server_asks_for_the_secret() -> None:
    at, serving = HashStore(), KVServer(1, is_synchronous=True)
    with listening(at, "0", "127.0.0.1", serving.serve):
        about = json.loads(at.get("0"))
        at.set("wrong", json.dumps(about | {"secret": "00"}))
        with pytest.raises(ConnectionLost):
            connect(at, "wrong")


def test_a_script_without_the_roles_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAY_ROLE_SIZES", raising=False)
    with pytest.raises(KVError, match="needs a script with the roles `worker` and `server`"):
        kv.create("dist_sync")
    with pytest.raises(ValueError, match="use dist_sync or dist_async"):
        kv.create("local")  # type: ignore[arg-type]


SCRIPT = """
import os, torch
from pathlib import Path
from dray.train import kv

store = kv.create("dist_sync")
store.init("w", torch.zeros(3))
store.set_optimizer("sgd", lr=1.0)
for _ in range(3):
    value = store.pushpull("w", torch.full((3,), 1.0 + store.rank))
Path(__file__).with_name(f"{store.rank}-of-{store.num_workers}").write_text(str(value.tolist()))
"""


def test_a_script_with_the_roles_of_a_store(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    roles = {"worker": {"num_workers": 2}, "server": {"num_workers": 2}}
    document = {"script": {"entrypoint": str(script), "roles": roles}}
    store = loopback_store()

    def make(**options: Any) -> Any:
        return make_task(tmp_path, document, world_size=4, port=store.port, **options)

    gang = Gang(make, 4, None)
    try:
        gang.start()
        gang.wait(recovers=False)
    finally:
        gang.kill()
    assert [process.exitcode for process in gang.processes] == [0] * 4
    for rank in range(2):
        assert (tmp_path / f"{rank}-of-2").read_text() == "[-9.0, -9.0, -9.0]"
