"""Parameter servers: each mode compared with its equations, and complete jobs, including jobs in
which processes die."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dray import spec
from dray.spec import JobSpec
from dray.train.kv import connection
from ray_workers.recipes import RECIPES
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import LEFT_EXIT_CODE, STALENESS_COUNT, Cause, RankTask
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.core.progress import FINISHED_KEY
from ray_workers.training.data.sampler import DistributedBatchSampler
from ray_workers.training.elastic.store_server import loopback_store
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.parameter_server import shard
from ray_workers.training.parallel.parameter_server.batch_dispatcher import (
    CHIEF,
)
from ray_workers.training.parallel.parameter_server.layout import FlatLayout, flat
from ray_workers.training.parallel.parameter_server.served_shard import ServedShard
from ray_workers.training.parallel.parameter_server.shard import (
    DoneBatches,
    ParameterShard,
    Push,
)
from ray_workers.training.parallel.parameter_server.strategy import ParameterServerWorker
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.jobs import assert_same, document, series, weights
from tests.unit.training.ranks import (
    DEADLINE_S,
    Gang,
    checkpoint_refs,
    frames,
    last_status,
    make_task,
    replaced,
    run_ranks,
)

LR, MOMENTUM, DECAY, STRENGTH = 0.05, 0.9, 0.01, 0.5
NUM_BATCHES = 24
CORRECTIONS: list[Any] = [
    None,
    spec.Correction(name="staleness_lr"),
    spec.Correction(name="delay_compensation", strength=STRENGTH),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because the tensors are tiny, and threads that wait for each other would take
    a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


# Parts on the servers.


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_each_server_holds_an_equal_part_and_the_parts_make_the_whole(num_servers: int) -> None:
    model = net()
    layout = FlatLayout(model, num_servers)
    vector = torch.arange(float(sum(layout.sizes)))
    parts = [torch.cat(layout.part(vector, server)) for server in range(num_servers)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 3
    assert torch.equal(layout.joined(parts), vector)
    layout.write(vector)
    assert torch.equal(flat(layout.tensors), vector)
    trained = vector[: layout.sizes.num_trained]
    without = [torch.cat(layout.part(trained, server)) for server in range(num_servers)]
    assert torch.equal(layout.joined(without), trained)


# A trace of pushes and pulls, replayed in plain tensor code.


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_trace_of_pushes_and_pulls_gives_the_weights_of_its_equations(
    correction: spec.Correction | None, name: Any
) -> None:
    model = net()
    layout = FlatLayout(model, 2)
    start = flat(layout.tensors)
    options = spec.Optimizer(name=name, lr=LR, momentum=0.0, weight_decay=DECAY)
    if name == "sgd":
        options = spec.Optimizer(name=name, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    shards = [ParameterShard(layout.sizes_of(n), options, None, correction) for n in range(2)]
    for server, each in enumerate(shards):
        each.load({"values": torch.cat(layout.part(start, server))}, DoneBatches())

    rng = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    reference = Reference(model, start, layout.sizes, name, correction)
    for batch in range(1, 41):
        worker = rng.randrange(3)
        if rng.random() < 0.5 or worker not in reference.pulled:
            pulled = [each.pull(worker).values.clone() for each in shards]
            reference.pull(worker)
            torch.testing.assert_close(layout.joined(pulled), reference.vector(), atol=1e-6, rtol=0)
        gradient = torch.randn(sum(layout.sizes), generator=generator)
        answers = [
            each.push(Push(worker, batch, LR, 0.0, torch.cat(layout.part(gradient, server))))
            for server, each in enumerate(shards)
        ]
        staleness = reference.push(worker, gradient)
        assert {answer.staleness for answer in answers} == {staleness}
        assert {answer.lr for answer in answers} == {reference.lr}
    found = layout.joined([each.pull(0).values.clone() for each in shards])
    torch.testing.assert_close(found, reference.vector(), atol=1e-6, rtol=0)
    assert max(shards[0].staleness) > 2, "nothing was stale"
    assert sum(shards[0].staleness.values()) == 40


class Reference:
    """The equations in the papers for whole tensors, with torch's optimizers."""

    def __init__(
        self, model: nn.Module, start: Tensor, sizes: Any, name: str, correction: Any
    ) -> None:
        self._correction = correction
        decayed, plain, buffers = torch.split(start.clone(), list(sizes))
        self._sizes = sizes
        self._weights = [decayed, plain]
        self._buffers = buffers
        make: Any = torch.optim.AdamW
        if name == "sgd":
            make = functools.partial(torch.optim.SGD, momentum=MOMENTUM)
        groups = [
            {"params": [decayed], "weight_decay": DECAY},
            {"params": [plain], "weight_decay": 0.0},
        ]
        self._optimizer = make(groups, lr=LR)
        self._version = 0
        self.pulled: dict[int, tuple[int, list[Tensor]]] = {}

    def vector(self) -> Tensor:
        return torch.cat([*self._weights, self._buffers])

    def pull(self, worker: int) -> None:
        self.pulled[worker] = (self._version, [each.clone() for each in self._weights])

    def push(self, worker: int, gradient: Tensor) -> int:
        version, old = self.pulled[worker]
        *gradients, change = torch.split(gradient, list(self._sizes))
        staleness, lr = self._version - version, LR
        if self._correction is not None and self._correction.name == "staleness_lr":
            lr = LR / staleness if staleness else LR
        if self._correction is not None and self._correction.name == "delay_compensation":
            gradients = [
                g + STRENGTH * g * g * (w - w_old)
                for g, w, w_old in zip(gradients, self._weights, old, strict=True)
            ]
        for weight, one in zip(self._weights, gradients, strict=True):
            weight.grad = one
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.lr = lr
        self._optimizer.step()
        self._buffers += change
        self._version += 1
        return staleness


def test_a_batch_counts_once_however_often_it_is_pushed() -> None:
    one = ParameterShard(shard.Sizes(2, 0, 0), spec.Optimizer(name="sgd", lr=1.0), None)
    push = Push(0, 1, 1.0, 0.0, torch.ones(2))
    assert one.push(push).counts
    assert not one.push(dataclasses.replace(push, worker=1)).counts
    assert one.pull(1).values.tolist() == [-1.0, -1.0]
    assert one.version == 1


def test_a_synchronous_shard_keeps_its_version_until_all_have_pushed_everywhere() -> None:
    """A worker can die when only one of two servers has its gradient. Its replacement still needs
    the weights before the step from both."""
    one = ParameterShard(shard.Sizes(1, 0, 1), spec.Optimizer(name="sgd", lr=1.0), 2)
    for worker, gradient in ((1, 5.0), (0, 1.0), (1, 3.0)):  # worker 1 recomputes it
        one.push(Push(worker, 1, 1.0, 0.25, torch.tensor([gradient, 2.0])))
        assert one.pull(1, 0).values.tolist() == [0.0, 0.0]
    weights = one.pull(0, 1)
    assert weights.values.tolist() == [-4.0, 2.0]  # buffers change by the mean
    assert (weights.loss, weights.squares) == (0.5, 16.0)
    assert not one.push(Push(1, 1, 1.0, 0.0, torch.ones(2))).counts
    assert one.pull(1, 1).values.tolist() == [-4.0, 2.0]


def test_a_state_goes_on_on_another_shard() -> None:
    options = spec.Optimizer(name="adamw", lr=LR)
    one, other = (ParameterShard(shard.Sizes(3, 2, 1), options, None) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 3):
        one.push(Push(0, batch, LR, 0.0, torch.randn(6, generator=generator)))
    other.load(one.state(), DoneBatches(1, {3}))
    for batch, version in ((2, 3), (3, 3), (4, 4)):
        push = Push(0, batch, LR, 0.0, torch.randn(6, generator=generator))
        assert one.push(push) == other.push(push)
        assert other.version == version
    assert torch.equal(one.pull(0).values, other.pull(0).values)
    assert other.done == DoneBatches(4)


# Complete jobs.


def job(sync: dict[str, Any], num_workers: int = 2, **train: Any) -> dict[str, Any]:
    """Return a job with two servers."""
    sync = {"kind": "parameter_server", "servers": 2, **sync}
    # With this seed, no sample is at the threshold of a ReLU, where rounding would matter.
    options: dict[str, Any] = {"schedule": {"name": "constant"}, "seed": 1}
    return document(num_workers + 2, **(options | train)) | {"sync": sync}


ASYNCHRONOUS = {"mode": "asynchronous"}
BOUNDED = {
    "mode": "bounded",
    "max_staleness": 1,
    "correction": {"name": "delay_compensation", "strength": STRENGTH},
}


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of an undisturbed synchronous job."""
    home = tmp_path_factory.mktemp("whole")
    assert run_ranks(home, job({}), world_size=4) == [0] * 4
    return home


def test_a_synchronous_job_trains_as_with_all_reduce(whole: Path, tmp_path: Path) -> None:
    alone = document(2, schedule={"name": "constant"}, seed=1)
    assert run_ranks(tmp_path, alone, world_size=2) == [0, 0]
    assert_near(weights(whole), weights(tmp_path))
    for key in ("train/loss", "val/loss", "train/grad_norm", "train/lr"):
        assert series(whole, key) == pytest.approx(series(tmp_path, key), rel=1e-5)
    assert min(series(whole, "perf/sent_bytes").values()) > 0


def told(home: Path, key: str) -> dict[int, float]:
    """Return the reports of all processes of workers by step; the service ignores repetitions."""
    bodies = [body for rank in (0, 1) for body in frames(home, rank=rank, kind="metrics")]
    return {body["step"]: body["values"][key] for body in bodies if key in body["values"]}


def kill_worker_1_in_step_11(task: RankTask) -> None:
    if (task.rank, task.incarnation) == (1, 0):
        die_when_pushing(11, to_server=None)


def kill_worker_1_between_servers(task: RankTask) -> None:
    if (task.rank, task.incarnation) == (1, 0):
        die_when_pushing(11, to_server=1)


def kill_the_chief_between_servers(task: RankTask) -> None:
    if (task.rank, task.incarnation) == (0, 0):
        die_when_pushing(11, to_server=1)


def kill_the_chief_in_an_evaluation(task: RankTask) -> None:
    if (task.rank, task.incarnation) == (0, 0):
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        arm(FaultPoint.BEFORE_EVALUATION, die, at_step=16)


def kill_the_chief_before_it_reports(task: RankTask) -> None:
    if (task.rank, task.incarnation) == (0, 0):
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        arm(FaultPoint.AFTER_OPTIMIZER, die, at_step=11)


def kill_the_chief_before_it_reports_the_end(task: RankTask) -> None:
    if (task.rank, task.incarnation) == (0, 0):
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        arm(FaultPoint.AFTER_OPTIMIZER, die, at_step=24)


def die_when_pushing(batch: int, *, to_server: int | None) -> None:
    """Die when the gradient of a batch, or of a later one, is only on server 0, or on no server."""
    send, servers = connection.TensorConnection.send, []

    def dying(self: connection.TensorConnection, header: Any, *payload: Tensor) -> None:
        if header.get("op") == "push" and header["batch"] >= batch:
            servers.append(header["batch"])
            if len(servers) > (to_server or 0):
                os.kill(os.getpid(), signal.SIGKILL)
        send(self, header, *payload)

    connection.TensorConnection.send = dying  # type: ignore[method-assign]


@ONE_SET
@pytest.mark.parametrize(
    "kill",
    [
        kill_worker_1_between_servers,
        kill_the_chief_before_it_reports,
        soak(kill_the_chief_before_it_reports_the_end),
        soak(kill_worker_1_in_step_11),
        soak(kill_the_chief_in_an_evaluation),
        soak(kill_the_chief_between_servers),
    ],
)
def test_a_synchronous_job_ends_alike_to_the_bit_when_a_worker_dies(
    kill: Any, whole: Path, tmp_path: Path
) -> None:
    codes = run_ranks(tmp_path, job({}), world_size=4, before=kill, recovers=True)
    assert codes == [0] * 4
    # These tell the supervisor that the job has recovered.
    page = last_status(tmp_path, *replaced(tmp_path), incarnation=1)
    assert page.generation == 1
    assert page.first_at > 0.0
    assert_same(weights(tmp_path), weights(whole))
    for key in ("train/loss", "val/loss"):
        assert told(tmp_path, key) == series(whole, key)


# A job whose servers record what they receive, and the same in plain tensor code.


def record(task: RankTask) -> None:
    """Make the servers record every pull and push, in order, and where a replacement server
    began."""
    home, answer, restore = home_of(task), ServedShard.answer, ServedShard.restore

    def note(served: ServedShard, *event: Any) -> None:
        if not served.is_replica:
            with trace_path(home, served.index, task.incarnation).open("a") as file:
                file.write(json.dumps(event) + "\n")

    def noted(self: ServedShard, worker: int, header: Any, payload: Tensor) -> Any:
        found = answer(self, worker, header, payload)
        if header["op"] in ("push", "pull"):
            counts = found.header.get("counts", True)
            note(self, header["op"], worker, header.get("batch", 0), counts)
        return found

    def restored(self: ServedShard, snapshot: Any) -> None:
        restore(self, snapshot)
        note(self, "restored", 0, self.version, True)

    ServedShard.answer = noted  # type: ignore[method-assign]
    ServedShard.restore = restored  # type: ignore[method-assign]


def home_of(task: RankTask) -> Path:
    return Path(task.spool_dir).parents[2]


def trace_path(home: Path, server: int, incarnation: int) -> Path:
    return home / f"trace-{server}.{incarnation}.jsonl"


Event = tuple[str, int, int, bool]
"""(push or pull, worker, batch of a push, whether it counts)."""


def trace_of(home: Path, server: int) -> list[Event]:
    """Return the events of a shard, excluding events after the last one that the replica has, and
    requests that were repeated because the reply was lost with the server."""
    found: list[Event] = []
    for incarnation in range(2):
        path = trace_path(home, server, incarnation)
        for line in path.read_text().splitlines() if path.exists() else ():
            op, worker, batch, counts = json.loads(line)
            if op == "restored":
                pushes = [at for at, event in enumerate(found) if counts_as_push(event)]
                del found[next(iter(pushes[batch:]), len(found)) :]
            elif op == "pull" or ("push", worker, batch, True) not in found:
                found.append((op, worker, batch, counts))
    return found


def counts_as_push(event: Event) -> bool:
    return event[0] == "push" and event[3]


class Replay:
    """The weights that result from the traces of two servers, with plain SGD with momentum.

    A gradient is computed from the weights that its worker pulled from both servers. Therefore the
    traces are followed alternately, each until it needs something from the other.
    """

    def __init__(self, home: Path, document: dict[str, Any], strength: float) -> None:
        self._strength = strength
        asked = JobSpec.model_validate(document)
        self._workload = RECIPES["image_classification"].build(asked, DataPolicy.open())
        self._model = self._workload.model
        materialise(self._model, torch.device("cpu"), asked.train.seed)
        self._layout = FlatLayout(self._model, 2)
        start = flat(self._layout.tensors)
        self._parts = [torch.cat(self._layout.part(start, server)) for server in (0, 1)]
        self._velocities = [torch.zeros_like(part) for part in self._parts]
        self._pulled: list[dict[tuple[int, int], Tensor]] = [{}, {}]
        self._num_pushes: list[Counter[int]] = [Counter(), Counter()]
        self._sampler = DistributedBatchSampler(
            len(self._workload.train),
            samples_per_step=asked.train.global_batch_size,
            seed=asked.train.seed,
            shares=[0],
            num_shares=1,
        )
        self._traces = [trace_of(home, server) for server in (0, 1)]

    def weights(self) -> dict[str, Tensor]:
        while any(self._traces):
            moved = [self._follow(server) for server in (0, 1)]
            assert any(moved), "the traces do not fit together"
        self._layout.write(self._layout.joined(self._parts))
        return self._model.state_dict()

    def _follow(self, server: int) -> bool:
        """Follow a trace as far as possible; return whether any event could be followed."""
        trace, moved = self._traces[server], False
        while trace and self._happens(server, *trace[0]):
            trace.pop(0)
            moved = True
        return moved

    def _happens(self, server: int, op: str, worker: int, batch: int, counts: bool) -> bool:
        if op == "pull":
            number = self._num_pushes[server][worker]
            self._pulled[server][worker, number] = self._parts[server].clone()
            return True
        key = (worker, self._num_pushes[server][worker])
        if key not in self._pulled[1 - server]:
            return False
        self._num_pushes[server][worker] += 1
        if counts:
            self._step(server, batch, key)
        return True

    def _step(self, server: int, batch: int, key: tuple[int, int]) -> None:
        at = self._layout.joined([pulled[key] for pulled in self._pulled])
        own = torch.cat(self._layout.part(self._gradient(at, batch), server))
        own += self._strength * own * own * (self._parts[server] - self._pulled[server][key])
        self._velocities[server] = MOMENTUM * self._velocities[server] + own
        self._parts[server] = self._parts[server] - LR * self._velocities[server]

    def _gradient(self, at: Tensor, batch: int) -> Tensor:
        self._layout.write(at)
        workload = self._workload
        rows = workload.train.rows[self._sampler.at(batch, batch)[0].indices.numpy()]
        inputs, targets = workload.train.fetch(rows)
        self._model.zero_grad()
        (workload.loss_sum(self._model(inputs), targets) / len(inputs)).backward()
        return flat([p.grad for _, p in self._layout.trained if p.grad is not None])


SGD = {"optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0}}


@pytest.mark.parametrize("sync", [BOUNDED, soak(ASYNCHRONOUS)])
def test_the_trace_of_a_job_replayed_gives_its_weights(sync: Any, tmp_path: Path) -> None:
    asked = job(sync, **SGD)
    assert run_ranks(tmp_path, asked, world_size=4, before=record) == [0] * 4
    strength = STRENGTH if "correction" in sync else 0.0
    assert_near(weights(tmp_path), Replay(tmp_path, asked, strength).weights())
    for server in range(2):
        batches = [batch for op, _, batch, counts in trace_of(tmp_path, server) if op == "push"]
        assert sorted(batches) == list(range(1, NUM_BATCHES + 1))
    assert max(told(tmp_path, "val/accuracy")) == NUM_BATCHES
    assert series(tmp_path, "sync/staleness_p95").keys() == series(tmp_path, "val/loss").keys()
    clocks = [max(series(tmp_path, "sync/clock", rank=rank).values()) for rank in (0, 1)]
    assert sum(clocks) == NUM_BATCHES
    # For each batch, one worker pulls the weights and pushes a gradient; others may have pulled,
    # too.
    gradient = 4 * sum(each.numel() for each in weights(tmp_path).values())
    sent = series(tmp_path, "sync/sent_bytes")
    assert sent.keys() == series(tmp_path, "val/loss").keys()
    assert all(1.5 * gradient < each < 3 * gradient for each in sent.values())
    for server in (2, 3):
        # Between two reports, a step can be counted before any worker has pulled its weights.
        assert max(series(tmp_path, "perf/sent_bytes", rank=server).values()) > 0


def record_and_kill(victim: int, task: RankTask) -> None:
    """Record, and make the other worker wait before pushing until the victim has died between two
    servers."""
    record(task)
    home = home_of(task)
    if (task.rank, task.incarnation) == (victim, 0):
        die_when_pushing(1, to_server=1)
    if task.rank == 1 - victim:
        hold_the_first(lambda: "push" not in [event[0] for event in trace_of(home, 0)])


def hold_the_first(is_held: Callable[[], bool]) -> None:
    """Hold this worker in its first batch as long as the condition is true."""
    computed = []

    def hold() -> None:
        computed.append(1)
        while len(computed) == 1 and is_held():
            time.sleep(0.001)

    arm(FaultPoint.BEFORE_EXCHANGE, hold)


@SOAK
@pytest.mark.parametrize("victim", [1, soak(CHIEF)])
def test_the_others_go_on_when_a_worker_dies_and_each_batch_counts_once(
    victim: int, tmp_path: Path
) -> None:
    kill = functools.partial(record_and_kill, victim)
    asked = job({**ASYNCHRONOUS, "push_dtype": "bf16"})
    codes = run_ranks(tmp_path, asked, world_size=4, before=kill, recovers=True)
    assert codes == [0] * 4
    for server in range(2):
        trace = trace_of(tmp_path, server)
        counted = [batch for op, _, batch, counts in trace if op == "push" and counts]
        assert sorted(counted) == list(range(1, NUM_BATCHES + 1))
    assert max(told(tmp_path, "val/accuracy")) == NUM_BATCHES
    num_elements = sum(each.numel() for each in weights(tmp_path).values())
    assert min(told(tmp_path, "perf/sent_bytes").values()) < 4 * num_elements, "of a gradient"


def record_and_hold_worker_1(task: RankTask) -> None:
    """Make the first batch of worker 1 last until all others are done, none of which ends before it
    has begun."""
    record(task)
    home = home_of(task)

    def is_held() -> bool:
        trace = trace_of(home, 0)
        if task.rank == 1:
            return sum(op == "push" for op, *_ in trace) < NUM_BATCHES - 1
        return ("pull", 1, 0, True) not in trace

    hold_the_first(is_held)


def note_rates(task: RankTask) -> None:
    """Make server 0 record the learning rate of each update, by step."""
    home, answer, apply = home_of(task), ServedShard.answer, ParameterShard._apply
    is_server_0 = False

    def noted(self: ServedShard, worker: int, header: Any, payload: Tensor) -> Any:
        nonlocal is_server_0
        is_server_0 = self.index == 0 and not self.is_replica
        return answer(self, worker, header, payload)

    def applied(self: ParameterShard, batch: int, gradient: Tensor, lr: float, loss: float) -> None:
        apply(self, batch, gradient, lr, loss)
        if is_server_0:
            with (home / "rates.jsonl").open("a") as file:
                file.write(json.dumps([self.version, lr]) + "\n")

    ServedShard.answer = noted  # type: ignore[method-assign]
    ParameterShard._apply = applied  # type: ignore[method-assign]
    if task.rank == 0:  # the chief, whose rates are reported and whose first gradient is late
        hold_the_first(lambda: len(rates_of(home)) < 5)


def rates_of(home: Path) -> dict[int, float]:
    path = home / "rates.jsonl"
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def test_the_reported_rate_is_the_one_that_was_applied(tmp_path: Path) -> None:
    """With a schedule in which a late batch has the learning rate for its number, divided by the
    staleness."""
    sync = {**ASYNCHRONOUS, "correction": {"name": "staleness_lr"}}
    asked = job(sync, num_workers=3, schedule={"name": "linear"})
    assert run_ranks(tmp_path, asked, world_size=5, before=note_rates) == [0] * 5
    applied = rates_of(tmp_path)
    assert sorted(applied) == list(range(1, NUM_BATCHES + 1))
    reported, stale = series(tmp_path, "train/lr"), series(tmp_path, "sync/staleness")
    assert reported
    assert reported == {step: applied[step] for step in reported}
    assert max(stale[step] for step in reported) >= 5, "nothing was divided"


def test_a_worker_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    asked = job(ASYNCHRONOUS)
    codes = run_ranks(tmp_path, asked, world_size=4, before=record_and_hold_worker_1)
    assert codes == [0] * 4
    workers = [worker for op, worker, _, _ in trace_of(tmp_path, 0) if op == "push"]
    assert workers == [0] * (NUM_BATCHES - 1) + [1]
    (staleness,) = series(tmp_path, "sync/staleness", rank=1).values()
    assert staleness == NUM_BATCHES - 1
    assert series(tmp_path, "sync/staleness_max")[NUM_BATCHES] == NUM_BATCHES - 1
    counts = [series(tmp_path, f"{STALENESS_COUNT}{bucket}") for bucket in ("000", "017_032")]
    assert [count[NUM_BATCHES] for count in counts] == [NUM_BATCHES - 1, 1]


def come_too_late(task: RankTask) -> None:
    """Make this worker arrive after the result is stored; the servers end without notifying it."""
    connect = ParameterServerWorker.connect

    def connect_late(self: ParameterServerWorker, store: Any, *given: Any) -> None:
        store.wait([FINISHED_KEY])
        connect(self, store, *given)
        self.servers.close()

    if task.rank == 1:
        ParameterServerWorker.connect = connect_late  # type: ignore[method-assign]


def test_a_worker_that_comes_too_late_ends_well(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path, job(ASYNCHRONOUS), world_size=4, before=come_too_late)
    assert codes == [0] * 4
    assert last_status(tmp_path, 1).resumed_step == NUM_BATCHES
    assert max(series(tmp_path, "train/loss")) == NUM_BATCHES


def kill_a_server(task: RankTask) -> None:
    """Kill a server that has the gradient of one worker for batch 5."""
    push = ParameterShard.push

    def dying(self: ParameterShard, given: Push) -> Any:
        if given.batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return push(self, given)

    if task.rank == 3:
        ParameterShard.push = dying  # type: ignore[method-assign]


def test_workers_end_with_an_error_when_a_server_dies(tmp_path: Path) -> None:
    """The attempt must end, because no other process has this part of the weights."""
    with ranks_of(tmp_path, job({}), kill_a_server) as gang:
        for process in gang.processes[:2]:
            process.join()
        assert [process.exitcode for process in gang.processes[:2]] == [1, 1]
    for rank in (0, 1):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert error["cause"] == Cause.WORKER_LOST


# Servers that hold each other's replicas.

REPLICATED = {"shards_kept_by": "replica"}


def kill_server(server: int, batch: int, *, has_taken: bool, by: int = signal.SIGKILL) -> Any:
    """Make a server die with a gradient of this batch or a later one: either before it applies the
    gradient, or after its replica has it but before the worker gets the reply."""
    return functools.partial(_kill_server, server, batch, has_taken, by)


def _kill_server(server: int, batch: int, has_taken: bool, by: int, task: RankTask) -> None:
    record(task)
    if (task.rank, task.incarnation) != (2 + server, 0):
        return
    answer, send, taken = ServedShard.answer, connection.TensorConnection.send, []

    def noted(self: ServedShard, worker: int, header: Any, payload: Tensor) -> Any:
        if header["op"] == "push" and header["batch"] >= batch and not self.is_replica:
            if not has_taken:
                os.kill(os.getpid(), by)
            taken.append(batch)
        return answer(self, worker, header, payload)

    def dying(self: connection.TensorConnection, header: Any, *payload: Tensor) -> None:
        if taken and "counts" in header:
            os.kill(os.getpid(), by)
        send(self, header, *payload)

    ServedShard.answer = noted  # type: ignore[method-assign]
    connection.TensorConnection.send = dying  # type: ignore[method-assign]


def kill_a_worker_and_a_server(task: RankTask) -> None:
    """Kill the worker between two servers, and then the other server."""
    kill_worker_1_between_servers(task)
    kill_server(0, 11, has_taken=True)(task)


@pytest.mark.parametrize(
    "kill",
    [
        kill_a_worker_and_a_server,
        soak(kill_server(0, 11, has_taken=False)),
        soak(kill_server(1, 11, has_taken=True)),
        soak(kill_server(1, 1, has_taken=False)),
        soak(kill_server(0, NUM_BATCHES, has_taken=True)),
    ],
)
def test_a_synchronous_job_ends_alike_to_the_bit_when_a_server_with_a_replica_dies(
    kill: Any, whole: Path, tmp_path: Path
) -> None:
    codes = run_ranks(tmp_path, job(REPLICATED), world_size=4, before=kill, recovers=True)
    assert codes == [0] * 4
    assert_same(weights(tmp_path), weights(whole))
    for key in ("train/loss", "val/loss"):
        assert told(tmp_path, key) == series(whole, key)


@SOAK
@pytest.mark.parametrize(
    ("server", "batch", "has_taken"),
    [(0, 5, True), soak(0, 1, False), soak(1, 9, True), soak(1, 9, False)],
)
def test_the_trace_of_a_job_that_lost_a_server_replayed_gives_its_weights(
    server: int, batch: int, has_taken: bool, tmp_path: Path
) -> None:
    asked = job({**BOUNDED, **REPLICATED}, **SGD)
    kill = kill_server(server, batch, has_taken=has_taken)
    codes = run_ranks(tmp_path, asked, world_size=4, before=kill, recovers=True)
    assert codes == [0] * 4
    assert replaced(tmp_path) == [2 + server]
    for each in range(2):
        pushes = [event[2] for event in trace_of(tmp_path, each) if counts_as_push(event)]
        assert sorted(pushes) == list(range(1, NUM_BATCHES + 1))
    assert_near(weights(tmp_path), Replay(tmp_path, asked, STRENGTH).weights())
    clocks = [max(series(tmp_path, "sync/clock", rank=rank).values()) for rank in (0, 1)]
    assert sum(clocks) == NUM_BATCHES
    page = last_status(tmp_path, 2 + server, incarnation=1)
    assert page.generation == 1
    assert page.first_at > 0.0, "by this the supervisor knows that the job has recovered"


@SOAK
def test_a_stopped_server_is_waited_for_until_it_is_killed(tmp_path: Path) -> None:
    """Its connections remain intact, so no other process notices earlier."""
    stop = kill_server(1, 5, has_taken=True, by=signal.SIGSTOP)
    with ranks_of(tmp_path, job({**ASYNCHRONOUS, **REPLICATED}), stop) as gang:
        stopped = gang.processes[3]
        wait_until(lambda: state_of(stopped.pid) == "T")
        stopped.kill()
        gang.wait(recovers=True)
        assert [process.exitcode for process in gang.processes] == [0] * 4
    assert max(told(tmp_path, "val/accuracy")) == NUM_BATCHES


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("sync", [{}, soak(ASYNCHRONOUS)])
def test_all_workers_end_when_the_training_is_over_early(sync: Any, tmp_path: Path) -> None:
    nothing_improves = {"name": "sgd", "lr": 1e-30, "momentum": 0.0}
    early = {"metric": "val/loss", "patience": 1}
    asked = job(sync, optimizer=nothing_improves, early_stopping=early, epochs=100)
    assert run_ranks(tmp_path, asked, world_size=4) == [0] * 4
    assert len(series(tmp_path, "val/loss")) == 2


# Checkpoints.


def ask_the_chief_to_leave(task: RankTask) -> None:
    if task.rank == CHIEF:
        ask = functools.partial(heartbeat.ask_to_leave, task.page_prefix)
        arm(FaultPoint.BEFORE_OPTIMIZER, ask, at_step=None if is_shared(task) else 12)


def is_shared(task: RankTask) -> bool:
    return bool(task.spec["sync"]["mode"] != "synchronous")


@pytest.mark.parametrize("sync", [{}, soak(ASYNCHRONOUS), soak(REPLICATED)])
def test_a_job_resumes_from_the_checkpoint_that_it_left(
    sync: Any, whole: Path, tmp_path: Path
) -> None:
    left(tmp_path, job(sync))
    refs = checkpoint_refs(tmp_path)
    if "mode" not in sync:
        assert refs[0].step == 12
    done = checkpoint_files.load(refs[0]).state["servers"]["done"]
    assert next(up_to + len(above) for up_to, above in done) == refs[0].step
    again = run_ranks(tmp_path, job(sync), world_size=4, attempt=2, resume_from=refs[:1])
    assert again == [0] * 4
    if "mode" not in sync:
        assert_same(weights(tmp_path, attempt=2), weights(whole))


def left(home: Path, document: dict[str, Any]) -> None:
    """Run it until the chief has left on request."""
    with ranks_of(home, document, ask_the_chief_to_leave) as gang:
        gang.processes[CHIEF].join()
        assert gang.processes[CHIEF].exitcode == LEFT_EXIT_CODE


@contextmanager
def ranks_of(
    home: Path, document: dict[str, Any], before: Callable[[RankTask], None]
) -> Iterator[Gang]:
    """Yield the processes of four ranks, which are terminated at the end of the block."""
    store = loopback_store()
    make = functools.partial(make_task, home, document, world_size=4, port=store.port)
    gang = Gang(make, 4, before)
    try:
        gang.start()
        yield gang
    finally:
        gang.kill()
