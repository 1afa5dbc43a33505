"""AD-PSGD: a recorded trace of the events of each copy is replayed with plain tensors."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dray.spec import Gossip
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import LEFT_EXIT_CODE, RankTask
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.training.core.errors import UnendingOperationError
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.loop.step_reporter import Batch
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.gossip.asynchronous import Averaging, SharedCopy
from ray_workers.training.parallel.gossip.graphs import sides_of
from ray_workers.training.parallel.gossip.mixing import FlatCopy
from tests.marks import SOAK, soak
from tests.unit.training.jobs import series, weights
from tests.unit.training.parallel.gossip.test_synchronous import (
    LR,
    MOMENTUM,
    STEPS,
    MatrixForm,
    assert_close,
    copies,
    job,
)
from tests.unit.training.ranks import checkpoint_refs, run_in_group, run_ranks

SLOW = 1
Event = tuple[str, Any]


class Recorder:
    """Makes each rank record the events of its copy, in order. Copies in transit are identified by
    their numbers, which are all different."""

    def __init__(self, folder: Path, slow_s: float = 0.0) -> None:
        self._folder, self._slow_s = folder, slow_s

    def __call__(self, task: RankTask) -> None:
        self.events: list[Event] = []
        self._computed: tuple[int, int] = (0, 0)
        for name in ("advance", "refresh", "offer", "meet", "close"):
            setattr(SharedCopy, name, self._recorded(name, getattr(SharedCopy, name)))
        arm_with(FaultPoint.STEP_BEGINS, self._begin_step)
        arm_with(FaultPoint.SHARE_BEGINS, functools.partial(self._compute, task.rank))
        arm(FaultPoint.BEFORE_RESULT, functools.partial(self._write, task.rank))

    def _begin_step(self, trainer: Trainer) -> None:
        self._computed = (trainer.progress.step + 1, 0)

    def _compute(self, rank: int, batch: Batch) -> None:
        self._computed = (self._computed[0], batch.feed.shares[0].batch.number)
        if rank == SLOW:
            time.sleep(self._slow_s)

    def _recorded(self, name: str, method: Any) -> Any:
        def recorded(copy: SharedCopy, *given: list[Tensor]) -> Any:
            with copy.lock:
                found = method(copy, *given)
                if name in ("advance", "refresh"):
                    self.events.append((name, self._computed))
                else:
                    seen = {"offer": found, "meet": given and given[0], "close": given and given[0]}
                    self.events.append((name, seen[name][0].double().sum().item()))
                return found

        return recorded

    def _write(self, rank: int) -> None:
        (self._folder / f"trace-{rank}.json").write_text(json.dumps(self.events))

    def traces(self, world_size: int) -> list[list[Event]]:
        files = (self._folder / f"trace-{rank}.json" for rank in range(world_size))
        return [json.loads(file.read_text()) for file in files]


def replay(form: MatrixForm, traces: list[list[Event]]) -> Tensor:
    """Return the copies, as the rows of a matrix, after all events have been applied to them."""
    rows, read = form.first.clone(), form.first.clone()
    velocity = torch.zeros_like(rows)
    offered: dict[float, Tensor] = {}
    answered: dict[float, Tensor] = {}
    waiting = [list(reversed(trace)) for trace in traces]
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, events in enumerate(waiting):
            while events:
                name, what = events[-1]
                if name == "advance":
                    step, share = what
                    gradient = form.gradient(read[rank], share, step)
                    velocity[rank] = MOMENTUM * velocity[rank] + gradient
                    rows[rank] = rows[rank] - LR * velocity[rank]
                    read[rank] = rows[rank]
                elif name == "refresh":  # before an evaluation
                    read[rank] = rows[rank]
                elif name == "offer":
                    offered[what] = rows[rank].clone()
                elif name == "meet" and what in offered:
                    answered[what] = rows[rank].clone()
                    rows[rank] = (rows[rank] + offered[what]) / 2
                elif name == "close" and what in answered:
                    rows[rank] = rows[rank] + (answered[what] - offered[what]) / 2
                else:
                    break  # it is waiting for another rank
                events.pop()
        assert sum(map(len, waiting)) < before, "ranks wait for each other in a circle"
    return rows


@SOAK
@pytest.mark.parametrize(
    ("sync", "world_size", "slow_s"),
    [
        ({"graph": "complete"}, 3, 0.02),
        soak({"graph": "ring"}, 4, 0.02),
        soak({"graph": "custom", "edges": [[0, 1], [1, 2], [2, 3]]}, 4, 0.0),
    ],
    ids=["complete-3", "ring-4", "custom-4"],
)
def test_a_recorded_trace_played_again_comes_to_the_same_copies(
    tmp_path: Path, sync: dict[str, Any], world_size: int, slow_s: float
) -> None:
    spec = job(world_size, {"mode": "ad_psgd", **sync})
    recorder = Recorder(tmp_path, slow_s)
    codes = run_ranks(tmp_path, spec, world_size=world_size, before=recorder)
    assert codes == [0] * world_size
    traces = recorder.traces(world_size)
    form = MatrixForm(spec, world_size)
    rows = replay(form, traces)
    found, model = copies(tmp_path)
    for copy, row in zip(found, rows, strict=True):
        assert_close(copy["model"], form.named(row))
    assert_close(model, form.named(rows.mean(dim=0)))
    assert_close(weights(tmp_path), form.named(rows.mean(dim=0)))
    events = [Counter(name for name, _ in trace) for trace in traces]
    for number in range(world_size):
        asked, _ = sides_of(Gossip(mode="ad_psgd", **sync), number, world_size)
        assert bool(events[number]["offer"]) == bool(asked)
    assert sum(of["offer"] for of in events) == sum(of["meet"] for of in events) > 0
    computed = [tuple(what) for trace in traces for name, what in trace if name == "advance"]
    every = {(step, share) for step in range(1, STEPS + 1) for share in range(world_size)}
    assert sorted(computed) == sorted(every), "every share is computed once"
    if slow_s:
        num_advanced = [of["advance"] for of in events]
        assert num_advanced[SLOW] < STEPS, "a slow rank takes fewer shares"
    assert set(series(tmp_path, "train/consensus_distance")) == {8, 16}
    stale = series(tmp_path, "sync/staleness_max")
    assert set(stale) == set(series(tmp_path, "sync/sent_bytes")) == {8, 16}
    assert stale[16] > 0 or not slow_s, "others averaged with the slow rank while it computed"


@SOAK
def test_all_leave_after_the_step_in_which_one_is_asked_to(tmp_path: Path) -> None:
    spec = job(2, {"mode": "ad_psgd"}, epochs=40)
    codes = run_ranks(tmp_path, spec, world_size=2, before=_ask_to_leave_at_step_4)
    assert codes[0] == LEFT_EXIT_CODE
    assert checkpoint_refs(tmp_path)[0].step >= 4


def _ask_to_leave_at_step_4(task: RankTask) -> None:
    """Rank 1 may be ahead; it ends after rank 0 has left, as the supervisor would require."""
    if task.rank == 0:
        ask = functools.partial(heartbeat.ask_to_leave, task.page_prefix)
        arm(FaultPoint.STEP_BEGINS, ask, at_step=4)
    else:
        arm_with(FaultPoint.STEP_BEGINS, _end_once_all_left)


def _end_once_all_left(trainer: Trainer) -> None:
    strategy: Any = trainer.strategy
    leaves_after = strategy._dynamic_shares.leaves_after
    if leaves_after is not None and trainer.progress.step >= leaves_after:
        os._exit(0)


def test_a_passive_rank_whose_thread_fails_does_not_wait_for_those_that_it_leaves_waiting() -> None:
    run_in_group(_fail_to_answer, 2)


def _fail_to_answer(rank: int) -> None:
    copy = SharedCopy(FlatCopy([torch.ones(4)]))
    copy.begin()
    if rank == 0:
        averaging = Averaging(copy, rank, ([1], []), HeartbeatPage(None))
        averaging.want()
        while not averaging._busy:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="onnection"):  # rank 1 has ended
            averaging.pause()
        os._exit(0)
    is_paused = threading.Event()

    def fail(theirs: Any) -> Any:
        is_paused.wait()
        raise ValueError("no memory")

    copy.meet = fail  # type: ignore[method-assign]
    averaging = Averaging(copy, rank, ([], [0]), HeartbeatPage(None))
    averaging.pause()
    is_paused.set()
    with pytest.raises(ValueError, match="no memory"):
        averaging.meet()
    os._exit(0)


@pytest.mark.parametrize("method", ["pause", "end"])
def test_a_rank_leaves_a_broken_group_although_the_thread_never_stops_waiting(
    method: str, tmp_path: Path
) -> None:
    run_in_group(_wait_in_vain, 2, method, tmp_path)


def _wait_in_vain(rank: int, method: str, folder: Path) -> None:
    """Rank 1 never responds, as if gloo did not notice that it is lost."""
    if rank == 1:
        while not (folder / "left").exists():
            time.sleep(0.001)
        os._exit(0)
    copy = SharedCopy(FlatCopy([torch.ones(4)]))
    copy.begin()
    prefix = heartbeat.prefix_of(folder, 0, 0)
    page = HeartbeatPage(heartbeat.page_path(prefix))
    page.begin(generation=1, step=3)
    averaging = Averaging(copy, rank, ([1], []), page)
    averaging.want()
    while not averaging._busy:
        time.sleep(0.001)
    heartbeat.announce(prefix, RankAssignment(2, 0, 2, None))
    with pytest.raises(UnendingOperationError):
        getattr(averaging, method)()
    averaging.abandon()  # does not wait for the thread
    (folder / "left").touch()
    os._exit(0)


@SOAK
def test_it_resumes_from_the_copies_of_a_checkpoint(tmp_path: Path) -> None:
    before, after = (job(2, {"mode": "ad_psgd"}, epochs=epochs) for epochs in (2, 3))
    assert run_ranks(tmp_path, before, world_size=2) == [0, 0]
    ref = checkpoint_refs(tmp_path)[0]
    assert run_ranks(tmp_path, after, world_size=2, attempt=2, resume_from=[ref]) == [0, 0]
    assert series(tmp_path, "val/loss", attempt=2)[24] < series(tmp_path, "val/loss")[16]
