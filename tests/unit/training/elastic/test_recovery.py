"""A rank dies and the others continue: no step is lost, and the weights are the same as without the
loss."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray import spec
from ray_workers.recipes.models import images
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.data import device_dataset
from ray_workers.training.elastic import rendezvous
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.trainer import Trainer
from tests.marks import ONE_SET, SOAK, soak, soak_but
from tests.unit.training.jobs import document, series, weights
from tests.unit.training.ranks import (
    DEADLINE_S,
    checkpoint_refs,
    frames,
    last_status,
    replaced,
    run_ranks,
)

CULPRIT = 1
STEP = 5


def small(num_workers: int, **train: Any) -> dict[str, Any]:
    """Return a job of 16 steps, with an evaluation and a checkpoint after steps 8 and 16."""
    return document(num_workers, epochs=2, **train)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fault:
    """Kills the first process of one rank at a given point in a given step."""

    def __init__(self, rank: int, point: str, step: int = STEP) -> None:
        self.rank, self.point, self.step = rank, point, step

    def __call__(self, task: RankTask) -> None:
        if task.rank == self.rank and task.incarnation == 0:
            POINTS[self.point](self.step)


def after_own_update(step: int, act: Callable[[], None] = die) -> None:
    """After the optimizer has stepped this rank's part, before anything is sent."""

    def hook(trainer: Trainer) -> None:
        optimizer = trainer.strategy.update._optimizer
        own = getattr(optimizer, "optim", optimizer)  # of ZeRO 1, for this rank's part
        own.register_step_post_hook(lambda *_: act())

    arm_with(FaultPoint.BEFORE_OPTIMIZER, hook, at_step=step)


def _at_last_gradient(trainer: Trainer, act: Callable[[], None]) -> None:
    """In the backward pass that begins now, when the gradient of the first layer is computed."""
    first = next(iter(trainer.strategy.model.parameters()))
    first.register_hook(lambda _: act())  # type: ignore[no-untyped-call]


def _in_backward(step: int) -> None:
    """In the middle of the backward pass, when some gradients may be in transit."""
    hook = functools.partial(_at_last_gradient, act=die)
    arm_with(FaultPoint.BEFORE_EXCHANGE, hook, at_step=step)


EVERY = 8
"""Number of steps between two evaluations, each followed by a checkpoint."""


def _at(point: FaultPoint, step: int | None = None) -> Callable[[int], None]:
    return lambda chosen: arm(point, die, at_step=chosen if step is None else step)


POINTS: dict[str, Callable[[int], None]] = {
    "before the first step": _at(FaultPoint.RESTORED, 0),
    "while the group is formed": lambda _: arm(FaultPoint.GROUP_JOINED, die),
    "in the data loader": _at(FaultPoint.STEP_BEGINS),
    "before the backward pass": _at(FaultPoint.BEFORE_EXCHANGE),
    "in the backward pass": _in_backward,
    "after the all-reduce, before the optimizer": _at(FaultPoint.BEFORE_OPTIMIZER),
    "in the optimizer": after_own_update,
    "after the step": _at(FaultPoint.AFTER_OPTIMIZER),
    "before the evaluation": _at(FaultPoint.BEFORE_EVALUATION, EVERY),
    "after the evaluation": _at(FaultPoint.AFTER_EVALUATION, EVERY),
    "when a checkpoint was begun": _at(FaultPoint.SAVE_BEGUN, EVERY),
    "before a checkpoint is written": _at(FaultPoint.BEFORE_WRITE, EVERY),
    "before a checkpoint's manifest": _at(FaultPoint.BEFORE_MANIFEST, EVERY),
    "when a checkpoint was committed": _at(FaultPoint.CHECKPOINT_COMMITTED, EVERY),
    "before the result is written": lambda _: arm(FaultPoint.BEFORE_RESULT, die),
    "when the result was written": lambda _: arm(FaultPoint.RESULT_WRITTEN, die),
}
RANK_0_ONLY = {
    "when a checkpoint was begun",
    "before a checkpoint is written",
    "before a checkpoint's manifest",
    "when a checkpoint was committed",
    "when the result was written",
}
SHORT = {
    "while the group is formed",
    "in the backward pass",
    "after the evaluation",
    "before the result is written",
    "before a checkpoint's manifest",
    "when the result was written",
}
"""Points tested by `make test`, at which the state of a survivor differs from its state at adjacent
points."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The home of a run without faults, created once for each number of ranks."""

    @functools.cache
    def run(world_size: int, **train: Any) -> Path:
        home = tmp_path_factory.mktemp("undisturbed")
        assert (
            run_ranks(home, small(world_size, **train), world_size=world_size) == [0] * world_size
        )
        return home

    return run


def assert_same(home: Path, other: Path) -> None:
    """Check that the weights are bitwise equal, and that rank 0 reported every step once with the
    same values."""
    expected = weights(other)
    found = weights(home)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for key in ("train/loss", "train/lr", "train/grad_norm", "val/loss", "val/accuracy"):
        assert once(home, key) == series(other, key), key


def once(home: Path, key: str) -> dict[int, float]:
    """Return the series as stored by the service, with the first report of each step in any
    incarnation."""
    told = frames(home, kind="metrics")
    found: dict[int, float] = {}
    for body in told:
        if key in body["values"]:
            assert found.setdefault(body["step"], body["values"][key]) == body["values"][key]
    return found


@pytest.mark.parametrize(
    "point", soak_but(sorted(POINTS.keys() - RANK_0_ONLY), short=SHORT - RANK_0_ONLY)
)
@pytest.mark.parametrize("rank", [0, soak(1)])
def test_a_killed_rank_is_replaced_and_nothing_is_lost(
    point: str, rank: int, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    codes = run_ranks(tmp_path, small(2), world_size=2, before=Fault(rank, point), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0], [rank])
    assert_same(tmp_path, undisturbed(2))


@ONE_SET
@pytest.mark.parametrize("point", soak_but(sorted(RANK_0_ONLY), short=SHORT & RANK_0_ONLY))
def test_rank_0_is_replaced_in_the_midst_of_its_own_work(
    point: str, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    codes = run_ranks(tmp_path, small(2), world_size=2, before=Fault(0, point), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0], [0])
    assert_same(tmp_path, undisturbed(2))
    refs = checkpoint_refs(tmp_path)
    assert refs[0].step == 16
    # Uncommitted work is repeated at the step that the others had reached.
    latest = 8 if point == "when a checkpoint was committed" else 16
    assert 8 <= refs[-1].step <= latest
    assert checkpoint_files.load(refs[0]).saved.step == 16


@SOAK
def test_of_four_ranks_the_one_across_learns_of_it_too(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """Its neighbours in the ring are alive, but they shut down their connections, so it also
    fails."""
    fault = Fault(2, "in the backward pass")
    assert run_ranks(tmp_path, small(4), world_size=4, before=fault, recovers=True) == [0] * 4
    assert replaced(tmp_path) == [2]
    assert_same(tmp_path, undisturbed(4))


@SOAK
def test_who_waits_for_a_rank_that_died_before_it_had_connected_is_woken(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    codes = run_ranks(tmp_path, small(3), world_size=3, before=_die_unconnected, recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0, 0], [2])
    assert_same(tmp_path, undisturbed(3))


def _die_unconnected(task: RankTask) -> None:
    """The others know that the rank has arrived, and are waiting for its address."""
    if task.rank == 2 and task.incarnation == 0:
        arm(FaultPoint.PEERS_ARE_THERE, die)


@SOAK
def test_what_rank_0_missed_of_a_step_that_others_ended_is_told(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    codes = run_ranks(tmp_path, small(3), world_size=3, before=_leave_rank_0_behind, recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0, 0], [2])
    assert_same(tmp_path, undisturbed(3))


def _leave_rank_0_behind(task: RankTask) -> None:
    """Step 8, with its evaluation, ends only on ranks 1 and 2; then rank 2 dies."""

    def lose_it() -> None:
        raise RuntimeError("Connection closed by peer")

    if task.rank == 0:
        arm(FaultPoint.BEFORE_OPTIMIZER, lose_it, at_step=8)
    if task.rank == 2 and task.incarnation == 0:
        arm(FaultPoint.AFTER_OPTIMIZER, die, at_step=8)


@SOAK
def test_two_of_three_ranks_die_one_after_the_other(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    faults = [Fault(0, "in the backward pass", 3), Fault(2, "after the step", 9)]
    codes = run_ranks(tmp_path, small(3), world_size=3, before=Faults(faults), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0, 0], [0, 2])
    assert_same(tmp_path, undisturbed(3))


WIDE: dict[str, Any] = {"name": "mlp", "width": 1024, "num_layers": 3}
"""DDP exchanges its 8 MiB of gradients in two buckets; each rank sends 4.2 MB for the first one."""
LATE_S = 0.3
ALL_REDUCE: dict[str, tuple[str | None, int]] = {
    "before the others have come": ("others", 1),
    "while the others wait in it": ("culprit", 64 << 10),
    "between two buckets": (None, 4_000_000),
}
"""For each case, the ranks that are late, and the number of bytes sent by the dying rank."""


class InAllReduce:
    """One rank dies after sending this number of bytes of a step's gradients, in its first
    bucket."""

    def __init__(self, rank: int, late: str | None, sent: int) -> None:
        self.rank, self.late, self.sent = rank, late, sent

    def __call__(self, task: RankTask) -> None:
        if task.incarnation:
            return
        is_culprit = task.rank == self.rank
        is_late = self.late == ("culprit" if is_culprit else "others")
        handlers: list[RendezvousHandler] = []

        def begin(trainer: Trainer) -> None:
            if is_late:
                time.sleep(LATE_S)
            if is_culprit:
                _at_last_gradient(trainer, functools.partial(time.sleep, DEADLINE_S))
                watch = functools.partial(self._die_when_sent, handlers[-1], _sent(handlers[-1]))
                threading.Thread(target=watch, daemon=True).start()

        arm_with(FaultPoint.PEERS_ARE_THERE, handlers.append)
        arm_with(FaultPoint.BEFORE_EXCHANGE, begin, at_step=STEP)

    def _die_when_sent(self, handler: RendezvousHandler, before: int) -> None:
        while _sent(handler) < before + self.sent:
            time.sleep(0.0002)
        die()


def _sent(handler: RendezvousHandler) -> int:
    sent = handler.sent_bytes()
    assert sent is not None
    return sent


@ONE_SET
@pytest.mark.parametrize(
    "when", soak_but(ALL_REDUCE, short=["before the others have come", "between two buckets"])
)
@pytest.mark.parametrize("rank", [soak(0), 1])
def test_a_rank_is_killed_in_the_midst_of_an_all_reduce_and_nothing_is_lost(
    when: str, rank: int, tmp_path: Path, undisturbed_wide: Path
) -> None:
    fault = InAllReduce(rank, *ALL_REDUCE[when])
    codes = run_ranks(tmp_path, wide(), world_size=2, before=fault, recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0], [rank])
    end = last_status(tmp_path, rank)
    assert (end.step, end.phase, end.collective) == (STEP - 1, RankPhase.EXCHANGE, STEP)
    assert_same(tmp_path, undisturbed_wide)


def wide() -> dict[str, Any]:
    return small(2, max_steps=8) | {"model": WIDE}


@pytest.fixture(scope="module")
def undisturbed_wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("wide")
    assert run_ranks(home, wide(), world_size=2) == [0, 0]
    return home


OPTIONS: dict[str, dict[str, Any]] = {
    "sgd with accumulation": {
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "micro_batch_size": 32,
    },
    "bf16, clipping and an average": {
        "precision": "bf16",
        "max_grad_norm": 0.5,
        "ema": {"decay": 0.9},
    },
    "fp16 with scaling": {"precision": "fp16"},
    "adafactor": {"optimizer": {"name": "adafactor", "lr": 0.01}},
    "lars": {"optimizer": {"name": "lars", "lr": 0.5, "momentum": 0.9}},
    "lamb": {"optimizer": {"name": "lamb", "lr": 0.01}},
    "dropout": {},
}


@ONE_SET
@pytest.mark.parametrize(
    "name", soak_but(OPTIONS, short=["sgd with accumulation", "bf16, clipping and an average"])
)
def test_whatever_a_replica_is_made_of_goes_to_the_newcomer_and_the_step_is_done_again(
    name: str, tmp_path: Path
) -> None:
    """The step is interrupted in its backward pass, also on the survivor."""
    plain, recovered = tmp_path / "plain", tmp_path / "recovered"
    document_ = small(2, **OPTIONS[name])
    if name == "dropout":
        document_["model"] |= {"dropout": 0.3}
    assert run_ranks(plain, document_, world_size=2) == [0, 0]
    fault = Fault(0, "in the backward pass", 6)
    codes = run_ranks(recovered, document_, world_size=2, before=fault, recovers=True)
    assert (codes, replaced(recovered)) == ([0, 0], [0])
    ends = [last_status(recovered, 0), last_status(recovered, 1)]
    assert ends[0].step == 5
    assert ends[1].resumed_step == 5, "the survivor had not done that step either"
    assert_same(recovered, plain)


class RunningMeans:
    """Adds batch normalisation to the perceptron, which dray's own models do not use; then injects
    a fault."""

    def __init__(self, then: Callable[[RankTask], None] | None = None) -> None:
        self.then = then

    def __call__(self, task: RankTask) -> None:
        hidden_layers = images.hidden_layers

        def normalised(options: spec.Mlp, num_inputs: int) -> list[nn.Module]:
            first, *rest = hidden_layers(options, num_inputs)
            return [first, nn.BatchNorm1d(options.width), *rest]

        images.hidden_layers = normalised
        if self.then is not None:
            self.then(task)


class FromAfar:
    """Keeps no data on the device, so that loader processes read it; then injects a fault."""

    def __init__(self, then: Callable[[RankTask], None] | None = None) -> None:
        self.then = then

    def __call__(self, task: RankTask) -> None:
        device_dataset.RESIDENT_BYTES = 0
        if self.then is not None:
            self.then(task)


@SOAK
def test_a_rank_with_loader_processes_is_replaced_and_nothing_is_lost(
    undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """They are forked from the rank, and must neither keep its connections open nor outlive it."""
    document_ = small(2) | {"data": {"loader_workers": 2}}
    fault = Fault(1, "in the data loader")
    codes = run_ranks(tmp_path, document_, world_size=2, before=FromAfar(fault), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0], [1])
    assert_same(tmp_path, undisturbed(2))


@SOAK
def test_a_step_that_is_done_again_starts_from_the_buffers_it_had(tmp_path: Path) -> None:
    """Running means change in the forward pass, before the step is interrupted."""
    document_ = small(2, max_steps=6, global_batch_size=64)
    plain, recovered = tmp_path / "plain", tmp_path / "recovered"
    assert run_ranks(plain, document_, world_size=2, before=RunningMeans()) == [0, 0]
    fault = RunningMeans(Fault(1, "in the backward pass", 4))
    assert run_ranks(recovered, document_, world_size=2, before=fault, recovers=True) == [0, 0]
    assert replaced(recovered) == [1]
    assert "body.2.running_mean" in weights(plain)
    assert_same(recovered, plain)


def test_the_error_of_one_rank_is_no_reason_for_another_try(tmp_path: Path) -> None:
    """If no next generation is announced, the others end with the error that they observed."""
    codes = run_ranks(tmp_path, small(2), world_size=2, before=Raising(1, 4))
    assert codes == [1, 1]
    errors = [frames(tmp_path, rank=rank, kind="error")[0]["cause"] for rank in (0, 1)]
    assert errors == ["worker_lost", "user_error"]


class Faults:
    """Several faults."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def __call__(self, task: RankTask) -> None:
        for fault in self.faults:
            fault(task)


class Raising:
    """Makes the code of one rank raise an error in a step; the others immediately stop waiting for
    an assignment."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def __call__(self, task: RankTask) -> None:
        rendezvous.ASSIGNMENT_LIMIT_S = 0.5
        if task.rank == self.rank:
            arm(FaultPoint.BEFORE_OPTIMIZER, _raise, at_step=self.step)


def _raise() -> None:
    raise ZeroDivisionError("the user's own")


class FlipsABit:
    """Rank 0 dies, and one bit in the weights of rank 1 has changed when it joins the next
    group."""

    def __call__(self, task: RankTask) -> None:
        Fault(0, "in the backward pass")(task)
        if task.rank == 1 and task.incarnation == 0:
            arm_with(FaultPoint.GROUP_JOINED, self.flip)

    def flip(self, trainer: Trainer) -> None:
        if trainer.assignment.generation:
            weight = next(iter(trainer.strategy.model.parameters())).detach()
            weight.view(torch.int32)[0, 0] ^= 1


def test_replicas_that_differ_after_a_handover_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    """One of three ranks has a different bit; the new rank has the state of the lowest survivor."""
    codes = run_ranks(tmp_path, small(3), world_size=3, before=FlipsABit(), recovers=True)
    assert codes == [1, 1, 1]
    for rank in range(3):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert error["cause"] == "worker_lost"
        assert "had different copies of the weights" in error["message"]
        assert last_status(tmp_path, rank).step < STEP, "no step was done in the new group"
