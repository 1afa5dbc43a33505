"""A spare takes the rank of a lost rank: no step is lost, and the weights are the same as without
the loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import RankPhase, TimeCategory
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.loop.trainer import Trainer
from tests.fakes import pretend_gpu, pretend_nccl
from tests.marks import ONE_SET, soak
from tests.unit.training.elastic.test_recovery import STEP, assert_same, die
from tests.unit.training.jobs import document
from tests.unit.training.ranks import DEADLINE_S, run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "on GPUs": {},
    "divided": {
        "parallel": {"shard": 2},
        "checkpoint": {"in_memory": {"every_steps": 2}},
    },
    "divided, with replicas": {
        "parallel": {"shard": 2},
        "elastic": {"spares": 1, "min_workers": 2},
    },
}
WITHOUT_REPLICAS = [kind for kind in KINDS if kind != "divided, with replicas"]
"""The kinds that are tested with two ranks."""


OF_DIVIDED = [soak("divided, with replicas", rank) for rank in (0, 2, 3)]


def with_spare(kind: str = "replicated", num_workers: int = 2) -> dict[str, Any]:
    return document(num_workers, epochs=2) | {"elastic": {"spares": 1}} | KINDS[kind]


class SpareFaults:
    """Kills ranks in the same step, once the spare waits for a rank, optionally together with the
    spare; or kills the first spare at a point on its way into the group."""

    def __init__(
        self,
        ranks: Sequence[int] = (),
        *,
        with_spare: bool = False,
        taking_over: FaultPoint | None = None,
        on_gpus: bool = False,
    ) -> None:
        self.ranks, self.with_spare = ranks, with_spare
        self.taking_over, self.on_gpus = taking_over, on_gpus

    def __call__(self, task: RankTask) -> None:
        if self.on_gpus:
            pretend_nccl.install()
        if task.rank in self.ranks and task.incarnation == 0:
            pages = Path(task.page_prefix).parent
            arm_with(
                FaultPoint.BEFORE_EXCHANGE,
                lambda trainer: self._act(trainer, pages, task.world_size),
                at_step=STEP,
            )
        if task.rank == task.world_size and self.taking_over is not None:
            arm(self.taking_over, die)

    def _act(self, trainer: Trainer, pages: Path, spare: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (standing := spares_standing(pages, spare)):
            assert time.monotonic() < deadline, "no spare was ready"
            trainer.page.move()
            time.sleep(0.005)
        if self.with_spare:
            os.kill(standing[0], signal.SIGKILL)
        (pages.parent / "killed-at").write_text(str(time.time()))
        die()


def spares_standing(pages: Path, first: int) -> list[int]:
    """Return the process ids of the spares that wait for a rank. `first` is the worker index of the
    first spare."""
    return [
        one.status.pid
        for one in heartbeat.observe_ranks(pages)
        if one.rank >= first and one.state and one.status.phase is RankPhase.STANDBY
    ]


def train(home: Path, kind: str, faults: SpareFaults, num_workers: int = 2) -> None:
    on_gpus = kind == "on GPUs"
    faults.on_gpus = on_gpus
    codes = run_ranks(
        home,
        with_spare(kind, num_workers),
        world_size=num_workers,
        device=pretend_gpu.NAME if on_gpus else "cpu",
        before=faults,
        recovers=True,
        num_spares=1 if faults.ranks else 0,
    )
    assert codes == [0] * num_workers


def recovery_s(home: Path) -> float:
    """Return the seconds from the loss of the rank to the next step."""
    pages = heartbeat.observe_ranks(home / "attempt-1" / "pages")
    first_at = max(one.status.first_at for one in pages if one.status.generation)
    return first_at - float((home / "attempt-1" / "killed-at").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The home of a run without faults, created once for each group."""
    homes: dict[tuple[str, int], Path] = {}

    def run(kind: str, num_workers: int = 2) -> Path:
        key = kind, num_workers
        if key not in homes:
            homes[key] = tmp_path_factory.mktemp("undisturbed")
            train(homes[key], kind, SpareFaults(), num_workers)
        return homes[key]

    return run


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("replicated", 1), *(soak(kind, rank) for kind in WITHOUT_REPLICAS for rank in (0, 1))],
)
def test_a_spare_takes_the_rank_of_a_killed_rank(
    kind: str, rank: int, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    train(tmp_path, kind, SpareFaults([rank]))
    pages = heartbeat.observe_ranks(tmp_path / "attempt-1" / "pages")
    assert (rank, 1) not in {(one.rank, one.incarnation) for one in pages}, "it was replaced anew"
    (uses,) = [one.status.uses for one in pages if one.rank == 2]
    assert uses[TimeCategory.USEFUL] + uses[TimeCategory.RECOMPUTED] > 0.0
    assert uses[TimeCategory.SPARE] > 0.0
    assert_same(tmp_path, undisturbed(kind))
    print(f"from the kill to the next step with a spare: {recovery_s(tmp_path):.3f} s")


@pytest.mark.parametrize(("kind", "rank"), [("divided, with replicas", 1), *OF_DIVIDED])
def test_a_spare_gets_the_part_of_a_killed_rank(
    kind: str, rank: int, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """Two replicas of two ranks."""
    train(tmp_path, kind, SpareFaults([rank]), num_workers=4)
    pages = heartbeat.observe_ranks(tmp_path / "attempt-1" / "pages")
    assert (rank, 1) not in {(one.rank, one.incarnation) for one in pages}, "it was replaced anew"
    (uses,) = [one.status.uses for one in pages if one.rank == 4]
    assert uses[TimeCategory.USEFUL] + uses[TimeCategory.RECOMPUTED] > 0.0
    assert_same(tmp_path, undisturbed(kind, 4))


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        soak(kind, point)
        for kind in WITHOUT_REPLICAS
        for point in (FaultPoint.PEERS_ARE_THERE, FaultPoint.GROUP_JOINED, FaultPoint.RESTORED)
    ],
)
def test_a_spare_is_killed_while_it_takes_over(
    kind: str, point: FaultPoint, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    train(tmp_path, kind, SpareFaults([1], taking_over=point))
    assert_same(tmp_path, undisturbed(kind))


@ONE_SET
@pytest.mark.parametrize("kind", [soak(kind) for kind in WITHOUT_REPLICAS])
def test_a_spare_and_a_rank_are_killed_together(
    kind: str, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    train(tmp_path, kind, SpareFaults([1], with_spare=True))
    assert_same(tmp_path, undisturbed(kind))


@ONE_SET
@pytest.mark.parametrize("num_workers", [soak(3)])
def test_two_ranks_are_killed_and_one_spare_is_ready(
    num_workers: int, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    train(tmp_path, "replicated", SpareFaults([0, 2]), num_workers)
    assert_same(tmp_path, undisturbed("replicated", num_workers))
