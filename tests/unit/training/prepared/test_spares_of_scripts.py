"""A spare of a prepared script takes the rank of a killed rank: no step is lost, and the result is
bitwise equal."""

from __future__ import annotations

import builtins
import time
from pathlib import Path

import pytest

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import TimeCategory
from tests.fakes import pretend_gpu, pretend_nccl
from tests.marks import soak
from tests.unit.training.elastic.test_spares import spares_standing
from tests.unit.training.prepared.programs import assert_same, run
from tests.unit.training.ranks import DEADLINE_S

SPARE = 2


class WaitsForSpare:
    """Adds a function to the program with which a rank waits until a spare waits for a rank."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, task: RankTask) -> None:
        if self.device != "cpu":
            pretend_nccl.install()
        pages = Path(task.page_prefix).parent

        def wait() -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not spares_standing(pages, SPARE):
                assert time.monotonic() < deadline, "no spare was ready"
                time.sleep(0.005)

        builtins.until_spare = wait  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", soak(pretend_gpu.NAME)])
def test_a_spare_of_a_script_takes_the_rank_of_a_killed_rank(tmp_path: Path, device: str) -> None:
    before = WaitsForSpare(device)
    killed = "lambda step: step == 7 and FIRST and RANK == 1 and (until_spare(), die(1, True))"
    killed = killed.replace("RANK", "int(os.environ['RANK'])")
    state = run(tmp_path / "killed", 2, before, device, num_spares=1, AFTER_STEP=killed)
    pages = heartbeat.observe_ranks(tmp_path / "killed" / "attempt-1" / "pages")
    assert (1, 1) not in {(one.rank, one.incarnation) for one in pages}, "it was replaced anew"
    (uses,) = [one.status.uses for one in pages if one.rank == SPARE]
    assert uses[TimeCategory.SPARE] > 0.0
    assert_same(state, run(tmp_path / "undisturbed", 2, before, device))
