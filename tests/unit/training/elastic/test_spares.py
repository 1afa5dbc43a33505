"""A spare takes the rank of a lost rank: no step is lost, and the weights are the same as without
the loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import RankPhase, TimeCategory
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.loop.trainer import Trainer
from tests.unit.training.elastic.test_recovery import STEP, assert_same, die
from tests.unit.training.jobs import document
from tests.unit.training.ranks import DEADLINE_S, run_ranks

SPARE = 2
"""The worker index of the first spare of two ranks."""


def with_spare(num_workers: int = 2, **fields: Any) -> dict[str, Any]:
    return document(num_workers, epochs=2) | {"elastic": {"spares": 1}} | fields


def is_standing_by(pages: Path) -> bool:
    """Whether a spare waits for a rank."""
    return any(
        one.rank >= SPARE and one.state and one.status.phase is RankPhase.STANDBY
        for one in heartbeat.observe_ranks(pages)
    )


class DiesOnceASpareIsReady:
    """Kills one rank in a step, once the spare waits for a rank; `of_spare` is called first in the
    process of the first spare."""

    def __init__(
        self,
        rank: int,
        point: FaultPoint = FaultPoint.BEFORE_EXCHANGE,
        of_spare: Callable[[RankTask], None] | None = None,
    ) -> None:
        self.rank, self.point, self.of_spare = rank, point, of_spare

    def __call__(self, task: RankTask) -> None:
        if task.rank == self.rank and task.incarnation == 0:
            pages = Path(task.page_prefix).parent
            arm_with(self.point, lambda trainer: self._act(trainer, pages), at_step=STEP)
        if task.rank == SPARE and self.of_spare is not None:
            self.of_spare(task)

    def _act(self, trainer: Trainer, pages: Path) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_standing_by(pages):
            assert time.monotonic() < deadline, "no spare was ready"
            trainer.page.move()
            time.sleep(0.005)
        (pages.parent / "killed-at").write_text(str(time.time()))
        die()


def recovery_s(home: Path) -> float:
    """Return the seconds from the loss of the rank to the next step."""
    pages = heartbeat.observe_ranks(home / "attempt-1" / "pages")
    first_at = max(one.status.first_at for one in pages if one.status.generation)
    return first_at - float((home / "attempt-1" / "killed-at").read_text())


def uses_of(home: Path, worker_index: int) -> dict[TimeCategory, float]:
    pages = heartbeat.observe_ranks(home / "attempt-1" / "pages")
    (uses,) = [one.status.uses for one in pages if one.rank == worker_index]
    return dict(uses)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(home, with_spare(), world_size=2) == [0, 0]
    return home


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spare_takes_the_rank_of_a_killed_rank(
    rank: int, tmp_path: Path, undisturbed: Path
) -> None:
    fault = DiesOnceASpareIsReady(rank)
    codes = run_ranks(
        tmp_path, with_spare(), world_size=2, before=fault, recovers=True, num_spares=1
    )
    assert codes == [0, 0]
    incarnations = {
        (one.rank, one.incarnation)
        for one in heartbeat.observe_ranks(tmp_path / "attempt-1" / "pages")
    }
    assert (rank, 1) not in incarnations, "another process was started in the rank's place"
    assert uses_of(tmp_path, SPARE)[TimeCategory.USEFUL] > 0.0
    assert uses_of(tmp_path, SPARE)[TimeCategory.SPARE] > 0.0
    assert_same(tmp_path, undisturbed)
    print(f"from the kill to the next step with a spare: {recovery_s(tmp_path):.3f} s")
