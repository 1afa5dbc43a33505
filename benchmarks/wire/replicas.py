"""Bytes and time of a step with replicas of parameter servers' shards, and without."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from benchmarks.figures import median_of_ratios
from benchmarks.report import Result, Row, Table
from dray.spec import JobSpec, ParameterServer
from dray.train.kv.connection import listening
from ray_workers.training.core.compat_torch import TCPStore
from ray_workers.training.elastic.store_server import loopback_store
from ray_workers.training.parallel.parameter_server.client import Servers
from ray_workers.training.parallel.parameter_server.layout import FlatLayout, flat
from ray_workers.training.parallel.parameter_server.replication import key_of, taken_over
from ray_workers.training.parallel.parameter_server.server import ShardServer
from ray_workers.training.parallel.parameter_server.shard import DoneBatches

NUM_ELEMENTS, NUM_SERVERS, NUM_STEPS = 1_000_000, 2, 20
MOST_ROUNDS = 10
SNAPSHOT, REPLICA = "snapshot", "replica"
LOOPBACK = "127.0.0.1"
LIMIT = timedelta(seconds=60)
METHOD = [
    f"One worker asynchronously pulls the weights of a model with {NUM_ELEMENTS:,} elements from "
    f"{NUM_SERVERS} servers and pushes a gradient, with sgd and momentum 0.9. It computes "
    "nothing, so the full cost of replicas is visible. The servers are processes on the same "
    "machine, with one torch thread each, and Ray does not run.",
    f"A round consists of {NUM_STEPS} steps with each choice in turn, and the ratio is the "
    "median over the rounds. Bytes are the weights and gradients that the worker and the "
    "servers send for a step. The limit is one gradient and the weights and, with replicas, one "
    "more gradient.",
    "In each round with replicas, one of the servers is killed afterwards, and the time from its "
    "death to the end of the next step is measured. The replacement process has already been "
    "started and has imported torch, like ranks that are created by a node's forkserver, and "
    "waits for a signal. With snapshots, the same death makes the job return to its checkpoint. "
    "The time to load a state into new servers is only a part of this.",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@dataclass
class Figures:
    """Measurements of one choice, by round."""

    step_s: list[float] = field(default_factory=list)
    step_bytes: list[float] = field(default_factory=list)
    begin_s: list[float] = field(default_factory=list)
    takeover_s: list[float] = field(default_factory=list)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """num_rounds: most turns of each choice."""
    found = {SNAPSHOT: Figures(), REPLICA: Figures()}
    for number in range(min(num_rounds, MOST_ROUNDS) + 1):
        for choice, figures in found.items():
            own = figures if number else Figures()  # the first one warms caches
            _round(choice, own)
            progress(f"round {number}: {choice}: {own.step_s[-1] * 1e3:.1f} ms a step")
    rows = []
    for choice, figures in found.items():
        ratio = median_of_ratios(list(zip(figures.step_s, found[SNAPSHOT].step_s, strict=True)))
        limit = 4 * NUM_ELEMENTS * (3 if choice == REPLICA else 2)
        sent = statistics.median(figures.step_bytes)
        rows.append(
            [
                choice,
                f"{sent / 1e6:.2f}",
                f"{sent / limit:.3f}",
                f"{statistics.median(figures.step_s) * 1e3:.1f}",
                str(ratio),
                f"{statistics.median(figures.begin_s) * 1e3:.0f}",
                f"{statistics.median(figures.takeover_s) * 1e3:.0f}" if figures.takeover_s else "",
            ]
        )
    columns = ["`shards_kept_by`", "MB a step", "of the algorithm's", "ms a step"]
    columns += ["time of snapshot [95%]", "ms to fill fresh servers", "ms of a death and a step"]
    return Result(
        name="server_replicas",
        title="Replicas of parameter servers, 1 million elements",
        method=METHOD,
        rows=[Row(choice, figures.step_s) for choice, figures in found.items()],
        comparisons=[],
        tables=[Table("What replicas of parameter servers cost", columns, rows)],
    )


def _round(choice: str, figures: Figures) -> None:
    torch.set_num_threads(1)
    document = _document(choice)
    assert isinstance(document.sync, ParameterServer)
    store = loopback_store()
    model = nn.Linear(1000, NUM_ELEMENTS // 1000, bias=False)
    layout = FlatLayout(model, NUM_SERVERS)
    vector = flat(layout.tensors)
    with _servers(store.port, choice) as processes:
        servers = Servers.connect(store, layout, 0, "", LIMIT, document.sync)
        began = time.perf_counter()
        done = [DoneBatches() for _ in range(NUM_SERVERS)]
        servers.begin({"values": vector, "momentum_buffer": vector}, done, 10 * NUM_STEPS, {})
        figures.begin_s.append(time.perf_counter() - began)
        worker = _Worker(servers, vector)
        worker.step()
        before, began = servers.state().moved_bytes, time.perf_counter()
        for _ in range(NUM_STEPS):
            worker.step()
        figures.step_s.append((time.perf_counter() - began) / NUM_STEPS)
        figures.step_bytes.append((servers.state().moved_bytes - before) / NUM_STEPS)
        if choice == REPLICA:
            figures.takeover_s.append(_takeover(processes, worker, store.port))
        servers.close()


class _Worker:
    def __init__(self, servers: Servers, gradient: torch.Tensor) -> None:
        self._servers = servers
        self._gradient = gradient
        self._done: int | None = None

    def step(self) -> None:
        batch = self._servers.take(self._done)
        assert batch is not None
        self._servers.pull(None)
        assert self._servers.push(batch, 1e-6, 0.0, self._gradient).counts
        self._done = batch


def _takeover(processes: list[Any], worker: _Worker, port: int) -> float:
    """Kill the second server, and give the word to the process that takes its place."""
    word = _context.Event()
    waiting = _context.Event()
    processes.append(_start(port, REPLICA, NUM_SERVERS - 1, (waiting, word)))
    waiting.wait()
    began = time.perf_counter()
    processes[NUM_SERVERS - 1].kill()
    processes[NUM_SERVERS - 1].join()
    threading.Thread(target=word.set).start()
    worker.step()
    return time.perf_counter() - began


@contextlib.contextmanager
def _servers(port: int, choice: str) -> Iterator[list[Any]]:
    processes = [_start(port, choice, server, None) for server in range(NUM_SERVERS)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _start(port: int, choice: str, server: int, events: Any) -> Any:
    process = _context.Process(target=_serve, args=(port, choice, server, events), daemon=True)
    process.start()
    return process


def _serve(port: int, choice: str, index: int, events: Any) -> None:
    """events: of a process that waits for the word to take a lost server's place."""
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, port, wait_for_workers=False)
    generation = 0 if events is None else 1
    server = ShardServer(index, NUM_SERVERS, _document(choice), generation=generation)
    if generation:
        waiting, word = events
        waiting.set()
        word.wait()
        snapshot = taken_over(store, index, NUM_SERVERS, generation)
        assert snapshot is not None
        server.take_over(snapshot)
    with listening(store, key_of(index), LOOPBACK, server.serve):
        server.replicate(store)
        while not server.is_over(1.0):
            pass


def _document(choice: str) -> JobSpec:
    sync = {"kind": "parameter_server", "servers": NUM_SERVERS, "mode": "asynchronous"}
    return JobSpec.model_validate(
        {
            "recipe": "image_classification",
            "train": {"optimizer": {"name": "sgd", "lr": 1e-6, "momentum": 0.9}},
            "resources": {"num_workers": 2 * NUM_SERVERS},
            "sync": {**sync, "shards_kept_by": choice},
        }
    )
