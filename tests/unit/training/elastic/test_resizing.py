"""A group continues with fewer ranks, and later with more, without affecting what it learns."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import AWAITING, RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.data.sampler import DistributedBatchSampler
from ray_workers.training.elastic.store_server import loopback_store
from ray_workers.training.loop.trainer import Trainer
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.elastic.test_recovery import RunningMeans, once
from tests.unit.training.jobs import document, series, weights
from tests.unit.training.ranks import DEADLINE_S, Gang, make_task, run_ranks

STEP_S = 0.03


class Slowly:
    """Makes each step slow enough for the group to be changed; `first` is called before.

    leash: the step from which the group waits for a generation, and the generation, so that it does
    not end earlier.
    """

    def __init__(
        self, first: Callable[[RankTask], None] | None, leash: Sequence[tuple[int, int]]
    ) -> None:
        self.first = first
        self.leash = leash

    def __call__(self, task: RankTask) -> None:
        if self.first is not None:
            self.first(task)
        arm_with(FaultPoint.STEP_BEGINS, self._wait)

    def _wait(self, trainer: Trainer) -> None:
        time.sleep(STEP_S)
        number = trainer.progress.step + 1
        while any(number >= s and trainer.page.wanted < g for s, g in self.leash):
            time.sleep(STEP_S)


class Resized:
    """A group whose size is changed by a test during training."""

    def __init__(
        self,
        home: Path,
        spec: dict[str, Any],
        world_size: int,
        leash: Sequence[tuple[int, int]],
        before: Callable[[RankTask], None] | None = None,
        device: str = "cpu",
    ) -> None:
        self.pages = home / "attempt-1" / "pages"
        self._store = loopback_store()
        make = functools.partial(
            make_task, home, spec, world_size=world_size, port=self._store.port, device=device
        )
        self.gang = Gang(make, world_size, Slowly(before, leash))
        self.tasks = list(self.gang.tasks)

    def until(self, probe: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not probe():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.005)

    def until_step(self, step: int) -> None:
        """Wait for a step in the latest round. If a rank is killed while it is connecting, the
        others are blocked until a supervisor terminates them."""
        number = self.gang.round_number
        self.until(
            lambda: any(
                s.status.step >= step and s.status.generation == number and s.status.first_at
                for s in heartbeat.observe_ranks(self.pages)
                if s.state
            )
        )

    def lose(self, *worker_indices: int, batch_size: int | None = None) -> None:
        for worker_index in worker_indices:
            self.gang.processes[worker_index].kill()
            self.gang.processes[worker_index].join()
        self.tasks = [task for task in self.tasks if task.rank not in worker_indices]
        self.gang.next_generation(self.tasks, batch_size)

    def gain(self, batch_size: int | None = None) -> None:
        """Start another rank, which gets its assignment when it is ready."""
        worker_index = len(self.gang.tasks)
        task = self.gang.add(rank=worker_index, incarnation=1, generation=AWAITING)
        waiting = heartbeat.RankPhase.STANDBY
        self.until(
            lambda: any(
                s.rank == worker_index and s.status.phase is waiting
                for s in heartbeat.observe_ranks(self.pages)
            )
        )
        self.tasks.append(task)
        self.gang.next_generation(self.tasks, batch_size)


def assert_learned_the_same(home: Path, alone: Path) -> None:
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert once(home, key) == pytest.approx(series(alone, key), rel=1e-4), key
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(home)[name], tensor, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("alone")
    assert run_ranks(home, document(3), world_size=3) == [0, 0, 0]
    return home


@ONE_SET
@pytest.mark.parametrize("lost", [[2], soak([0]), [0, 1]], ids=str)
def test_survivors_go_on_with_fewer_whoever_is_lost(
    lost: list[int], alone: Path, tmp_path: Path
) -> None:
    """This includes the loss of rank 0, whose work is taken over by the lowest remaining rank."""
    group = Resized(tmp_path, document(3), 3, [(12, 1)])
    try:
        group.gang.start()
        group.until_step(6)
        group.lose(*lost)
        group.gang.wait(recovers=False)
        codes = [group.gang.processes[task.rank].exitcode for task in group.tasks]
        assert codes == [0] * (3 - len(lost))
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


def test_a_group_shrinks_and_grows_again_without_a_restart(alone: Path, tmp_path: Path) -> None:
    group = Resized(tmp_path, document(3), 3, [(8, 1), (14, 2), (20, 3)])
    try:
        group.gang.start()
        group.until_step(4)
        group.lose(1)
        group.until_step(8)
        group.gain()
        group.until_step(14)
        group.lose(0)
        group.gang.wait(recovers=False)
        assert [group.gang.processes[task.rank].exitcode for task in group.tasks] == [0, 0]
        assert [task.rank for task in group.tasks] == [2, 3]
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


def test_one_rank_alone_grows_too(alone: Path, tmp_path: Path) -> None:
    group = Resized(tmp_path, document(1), 1, [(8, 1)])
    try:
        group.gang.start()
        group.until_step(3)
        group.gain()
        group.gang.wait(recovers=False)
        assert [process.exitcode for process in group.gang.processes] == [0, 0]
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


def test_the_interval_between_checkpoints_is_that_of_the_group_as_it_is(tmp_path: Path) -> None:
    spec = document(1) | {"checkpoint": {"every_steps": "auto"}}
    group = Resized(tmp_path, spec, 1, [(8, 1)], note_world_size)
    try:
        group.gang.start()
        group.until_step(3)
        group.gain()
        group.gang.wait(recovers=False)
    finally:
        group.gang.kill()
    assert (group.pages / "r0.0.sizes").read_text().split() == ["1", "2"]


def note_world_size(task: RankTask) -> None:
    """Record the world size that is used to compute the checkpoint interval of each group."""
    sizes: list[int] = []

    def note(trainer: Trainer) -> None:
        interval = trainer.triggers._interval
        assert interval is not None
        if interval._world_size not in sizes:
            sizes.append(interval._world_size)
            Path(f"{task.page_prefix}.sizes").write_text(" ".join(map(str, sizes)))

    arm_with(FaultPoint.STEP_ENDS, note)


def exact(**train: Any) -> dict[str, Any]:
    """Return a job with shares for four ranks; see also `means`."""
    return document(4, epochs=2, max_steps=30, global_batch_size=50, **train) | {
        "elastic": {"min_workers": 1, "exact": True},
    }


means = RunningMeans()
"""Running means, which depend on how a batch is divided."""


def assert_equal_to_the_bit(home: Path, plain: Path) -> None:
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert once(home, key) == series(plain, key), key
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(home)[name], tensor), name


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("four")
    assert run_ranks(home, exact(), world_size=4, before=means) == [0] * 4
    return home


@ONE_SET
@pytest.mark.parametrize("world_size", [1, soak(2), 3])
def test_an_exact_group_learns_the_same_to_the_bit_at_any_size(
    world_size: int, four: Path, tmp_path: Path
) -> None:
    codes = run_ranks(tmp_path, exact(), world_size=world_size, before=means)
    assert codes == [0] * world_size
    assert_equal_to_the_bit(tmp_path, four)


@SOAK
def test_an_exact_group_learns_the_same_to_the_bit_through_every_resize(
    four: Path, tmp_path: Path
) -> None:
    """It grows between two steps, without a broken group, and shrinks in the middle of a step."""
    group = Resized(tmp_path, exact(), 3, [(6, 1), (12, 2), (18, 3)], means)
    try:
        group.gang.start()
        group.until_step(2)
        group.lose(1)
        group.until_step(4)
        group.gain()
        group.until_step(7)
        group.lose(0)
        group.gang.wait(recovers=False)
        assert [group.gang.processes[task.rank].exitcode for task in group.tasks] == [0, 0]
    finally:
        group.gang.kill()
    assert_equal_to_the_bit(tmp_path, four)


@SOAK
def test_an_exact_group_learns_what_any_group_does(four: Path, tmp_path: Path) -> None:
    """Except for running means, which are computed from a single share, so the model has none."""
    plain = document(1, max_steps=30, global_batch_size=50)
    shared = document(4, max_steps=30, global_batch_size=50) | {"elastic": exact()["elastic"]}
    assert run_ranks(tmp_path / "plain", plain, world_size=1) == [0]
    assert run_ranks(tmp_path / "exact", shared, world_size=2) == [0, 0]
    assert_learned_the_same(tmp_path / "exact", tmp_path / "plain")


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_comes_once_in_an_epoch_under_any_sizes(seed: int) -> None:
    """The world size is different in every step of an epoch."""
    generator = torch.Generator().manual_seed(seed)
    num_samples, batch = (int(torch.randint(1, 200, (), generator=generator)) for _ in range(2))
    whole = DistributedBatchSampler(
        num_samples, samples_per_step=batch, seed=seed, shares=[0], num_shares=1
    )
    seen: list[int] = []
    for step in range(1, whole.steps_per_epoch + 1):
        world_size = int(torch.randint(1, 9, (), generator=generator))
        shares = [
            found
            for rank in range(world_size)
            for found in DistributedBatchSampler(
                num_samples,
                samples_per_step=batch,
                seed=seed,
                shares=[rank],
                num_shares=world_size,
            ).at(step, step)
        ]
        found = [i for share in shares if not share.is_empty for i in share.indices.tolist()]
        assert found == whole.at(step, step)[0].indices.tolist(), (
            "the order within the batch is kept"
        )
        seen += found
    assert sorted(seen) == list(range(num_samples))
