"""A group that divides a model continues with fewer replicas, and later with more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.spec import Parallel
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import AWAITING, Cause
from ray_workers.shared.mesh_shape import MeshShape
from ray_workers.supervision.rules.mesh_positions import Seated, arranged
from tests.fakes import pretend_gpu
from tests.marks import SOAK, soak
from tests.unit.training.elastic.test_recovery import once
from tests.unit.training.elastic.test_recovery_on_gpus import OnGpu
from tests.unit.training.elastic.test_resizing import Resized
from tests.unit.training.jobs import series
from tests.unit.training.parallel.test_model_parallel import EQUAL, brief, furthest
from tests.unit.training.ranks import frames, run_ranks

STEPS = {"max_steps": 16}


class ResizedReplicas(Resized):
    """A group in which ranks are assigned as by the supervisor."""

    def __init__(
        self,
        home: Path,
        parallel: dict[str, Any],
        world_size: int,
        leash: list[tuple[int, int]],
        device: str = "cpu",
    ) -> None:
        self.shape = MeshShape.of(Parallel.model_validate(parallel))
        spec = brief(home, world_size, parallel, **STEPS)
        spec |= {"elastic": {"min_workers": self.shape.num_parts}}
        before = OnGpu() if device == pretend_gpu.NAME else None
        super().__init__(home, spec, world_size, leash, before, device)
        self._workers = [
            Seated(rank, self.shape.position(rank, world_size)) for rank in range(world_size)
        ]
        self.ranks: tuple[int, ...] = ()
        """The processes in the latest round, in rank order."""

    def change(self, *, lost: tuple[int, ...] = (), num_more: int = 0) -> None:
        """Kill these processes, start more, and announce the next round."""
        for index in lost:
            self.gang.processes[index].kill()
            self.gang.processes[index].join()
        more = [self._start() for _ in range(num_more)]
        left = [one for one in self._workers if one.index not in lost]
        workers = [*left, *(Seated(index, None, self.gang.round_number + 1) for index in more)]
        self.ranks, idle = arranged(workers, self.shape)
        self.announce(self.ranks)
        placed = {
            index: self.shape.position(at, len(self.ranks)) for at, index in enumerate(self.ranks)
        }
        self._workers = [replace(one, position=placed.get(one.index)) for one in workers]
        assert len(idle) < self.shape.num_parts

    def announce(self, ranks: tuple[int, ...]) -> None:
        self.gang.next_generation([self.gang.tasks[index] for index in ranks])

    def _start(self) -> int:
        index = len(self.gang.tasks)
        self.gang.add(rank=index, incarnation=1, generation=AWAITING)
        self.until(
            lambda: any(
                one.rank == index and one.status.phase is heartbeat.RankPhase.STANDBY
                for one in heartbeat.observe_ranks(self.pages)
            )
        )
        return index


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a single process."""
    home = tmp_path_factory.mktemp("alone")
    assert run_ranks(home, brief(home, 1, {}, **STEPS), world_size=1) == [0]
    return home


MESHES: dict[str, dict[str, Any]] = {
    "shard": {"shard": 2},
    "ZeRO 1": {"shard": 2, "zero": 1},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
}
EACH_MESH = [mesh if mesh == "shard" else soak(mesh) for mesh in MESHES]


def assert_learned_the_same(home: Path, alone: Path) -> None:
    assert furthest(home, alone) < EQUAL
    for key in ("train/loss", "val/loss"):
        assert once(home, key) == pytest.approx(series(alone, key), rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", soak(pretend_gpu.NAME)])
@pytest.mark.parametrize("mesh", EACH_MESH)
def test_a_broken_replica_leaves_and_a_complete_one_joins(
    tmp_path: Path, alone: Path, mesh: str, device: str
) -> None:
    """Two parts of two replicas. Process 1 is lost, so one of the others is idle until another
    process joins."""
    group = ResizedReplicas(tmp_path, MESHES[mesh], 4, [(6, 1), (11, 2)], device)
    try:
        group.gang.start()
        group.until_step(3)
        group.change(lost=(1,))
        assert len(group.ranks) == 2
        group.until_step(6)
        group.change(num_more=1)
        assert sorted(group.ranks) == [0, 2, 3, 4]
        group.gang.wait(recovers=False)
        assert [each.exitcode for each in group.gang.processes] == [0, -9, 0, 0, 0]
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


@SOAK
@pytest.mark.parametrize("mesh", MESHES)
def test_a_replica_joins_a_single_one(tmp_path: Path, alone: Path, mesh: str) -> None:
    group = ResizedReplicas(tmp_path, MESHES[mesh], 2, [(5, 1)])
    try:
        group.gang.start()
        group.until_step(3)
        group.change(num_more=2)
        group.gang.wait(recovers=False)
        assert [each.exitcode for each in group.gang.processes] == [0] * 4
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


@SOAK
@pytest.mark.parametrize("mesh", sorted(MESHES.keys() - {"ZeRO 1"}))
def test_of_two_broken_replicas_one_complete_one_is_left(
    tmp_path: Path, alone: Path, mesh: str
) -> None:
    """The lost processes have different parts of different replicas. With ZeRO 1, both replicas
    can be left with half a step, so that the job resumes from its checkpoint."""
    group = ResizedReplicas(tmp_path, MESHES[mesh], 4, [(6, 1)])
    try:
        group.gang.start()
        group.until_step(3)
        positions = [group.shape.position(rank, 4) for rank in range(4)]
        group.change(lost=tuple(at for at, one in enumerate(positions) if one.part == one.replica))
        group.gang.wait(recovers=False)
        assert [group.gang.processes[each].exitcode for each in group.ranks] == [0, 0]
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


@SOAK
def test_a_process_is_lost_while_the_group_changes_its_size(tmp_path: Path, alone: Path) -> None:
    """The first round after the loss is never formed, because another process is lost."""
    group = ResizedReplicas(tmp_path, {"shard": 2}, 6, [(6, 2)])
    try:
        group.gang.start()
        group.until_step(3)
        group.change(lost=(1,))
        group.change(lost=(4,))
        assert len(group.ranks) == 4
        group.gang.wait(recovers=False)
        assert [group.gang.processes[each].exitcode for each in group.ranks] == [0] * 4
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, alone)


Ranks = Callable[[ResizedReplicas], tuple[int, ...]]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(lambda _: (1, 0, 3, 2), id="parts exchanged"),
        soak(lambda group: (0, 2, group._start(), group._start())),
    ],
)
def test_a_rank_does_not_load_its_state_into_another_part(tmp_path: Path, ranks: Ranks) -> None:
    """Ranks 0 and 2 have one part, and ranks 1 and 3 the other. If processes keep none of their
    parts, no process has a valid state, although the tensors have the same shapes."""
    group = ResizedReplicas(tmp_path, {"shard": 2}, 4, [(6, 1)])
    try:
        group.gang.start()
        group.until_step(3)
        found = ranks(group)
        for lost in {0, 1, 2, 3}.difference(found):
            group.gang.processes[lost].kill()
            group.gang.processes[lost].join()
        group.announce(found)
        group.gang.wait(recovers=False, ends_with_error=True)
    finally:
        group.gang.kill()
    errors = [each for rank in range(4) for each in frames(tmp_path, rank=rank, kind="error")]
    assert errors
    for error in errors:
        assert error["cause"] == Cause.WORKER_LOST
        assert "the job resumes from its latest checkpoint" in error["message"]
