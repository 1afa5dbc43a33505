"""The ranks of a prepared script compare their copies of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.scripts.prepared_script import RankGroup
from tests.marks import soak_but
from tests.unit.training.elastic.test_resizing import Resized
from tests.unit.training.prepared.programs import DEFAULTS, Leash, final_state, program
from tests.unit.training.prepared.test_prepared_recovery import CASES, POINTS
from tests.unit.training.prepared.test_prepared_resizing import elastic
from tests.unit.training.ranks import frames, run_ranks

SAVES = "{'checkpoint_every_steps': 1, 'keep': 1}"
CORRUPT = """lambda step: (
    (step, os.environ["RANK"]) == (6, "1") and setattr(model[0].weight, "data",
    torch.where(torch.arange(6) == 2, model[0].weight.data * 1.001, model[0].weight.data)))
"""


def checked(home: Path, num_workers: int, every: int, **options: str) -> dict[str, Any]:
    """Return the document of the program with comparisons of its replicas."""
    document = program(home, **options)
    resources = {"resources": {"num_workers": num_workers}}
    return {**document, **resources, "check": {"replicas_every": every}}


def test_the_rank_that_differs_is_named_at_the_next_comparison(tmp_path: Path) -> None:
    options = {"INIT": SAVES, "AFTER_STEP": " ".join(CORRUPT.split())}
    document = checked(tmp_path, 3, 4, **options)
    assert set(run_ranks(tmp_path, document, world_size=3, ends_with_error=True)) != {0}
    agreed, differing = frames(tmp_path, kind="replicas")
    assert (agreed["step"], agreed["num_differing"]) == (4, 0)
    assert (differing["step"], differing["num_differing"]) == (8, 1)
    assert [one["rank"] for one in differing["culprits"]] == [1]
    errors = [one for rank in range(3) for one in frames(tmp_path, rank=rank, kind="error")]
    assert {one["cause"] for one in errors} <= {"corrupted", "worker_lost"}
    assert "corrupted" in {one["cause"] for one in errors}
    dropped = {one["step"] for one in frames(tmp_path, kind="checkpoint_dropped")}
    assert 3 in dropped
    assert 4 not in dropped  # the newest that is known to be good


def test_a_difference_after_the_last_comparison_is_found_at_the_end(tmp_path: Path) -> None:
    options = {"AFTER_STEP": " ".join(CORRUPT.split())}
    document = checked(tmp_path, 3, 1000, **options)
    assert set(run_ranks(tmp_path, document, world_size=3, ends_with_error=True)) != {0}
    (report,) = frames(tmp_path, kind="replicas")
    assert (report["step"], [one["rank"] for one in report["culprits"]]) == (15, [1])


def test_a_drill_flips_a_bit(tmp_path: Path) -> None:
    document = checked(tmp_path, 3, 4)
    codes = run_ranks(tmp_path, document, world_size=3, before=drill, ends_with_error=True)
    assert set(codes) != {0}
    report = frames(tmp_path, kind="replicas")[-1]
    assert (report["step"], report["is_drill"]) == (8, True)
    assert [one["rank"] for one in report["culprits"]] == [2]


def drill(task: RankTask) -> None:
    def ask(group: RankGroup) -> None:
        group._replica_check._ask()

    if task.rank == 2:
        arm_with(FaultPoint.STEP_ENDS, ask, at_step=6)


@pytest.mark.parametrize(
    "case",
    soak_but(
        CASES, short=("between backward pass and step, rank 0 of 2", "at the end, rank 1 of 3")
    ),
)
@pytest.mark.parametrize("every", [1, 5])
def test_ranks_that_are_killed_cause_no_alarm(case: str, every: int, tmp_path: Path) -> None:
    point, where = case.rsplit(", ", 1)
    rank, world_size = (int(word) for word in where.split() if word.isdigit())
    options = {name: text.format(rank=rank) for name, text in POINTS[point].items()}
    document = checked(tmp_path, world_size, every, **options)
    codes = run_ranks(tmp_path, document, world_size=world_size, recovers=True)
    assert codes == [0] * world_size
    final_state(tmp_path, world_size)
    reports = [
        one for each in range(world_size) for one in frames(tmp_path, rank=each, kind="replicas")
    ]
    assert {one["num_differing"] for one in reports} == {0}
    last = 13 if "total_steps" in options.get("START", DEFAULTS["START"]) else 15
    assert max(one["step"] for one in reports) == last


@pytest.mark.parametrize("change", [-1, 1])
def test_a_group_that_changes_its_size_causes_no_alarm(change: int, tmp_path: Path) -> None:
    """Three ranks lose one of them, or two ranks gain another."""
    document = {**elastic(tmp_path, 3), "check": {"replicas_every": 1}}
    point = FaultPoint.STEP_ENDS if change > 0 else FaultPoint.BEFORE_EXCHANGE
    job = Resized(tmp_path, document, 3 if change < 0 else 2, [], Leash(point, 5))
    try:
        job.gang.start()
        job.until_step(5 if change > 0 else 4)
        if change > 0:
            job.gain()
        else:
            job.lose(2)
        staying = job.gang.processes[: 3 if change > 0 else 2]
        for process in staying:
            process.join()
        assert [process.exitcode for process in staying] == [0] * len(staying)
    finally:
        job.gang.kill()
    reports = frames(tmp_path, kind="replicas")
    assert {one["num_differing"] for one in reports} == {0}
    assert reports[-1]["step"] == 15
