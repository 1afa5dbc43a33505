"""Gossip and the life of a job: resuming, other sizes, leaving, and ranks that die."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import LEFT_EXIT_CODE, RankTask
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.marks import SOAK, soak
from tests.unit.training.jobs import assert_same, die_at_step_18, series
from tests.unit.training.parallel.gossip.test_synchronous import THREE, UNEVEN, job
from tests.unit.training.parallel.test_local_sgd import ask_rank_0_to_leave
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks

ADAM = {"name": "adamw", "lr": 0.003}
SGP = {"mode": "sgp", "graph": "custom", "edges": THREE}


@pytest.mark.parametrize("sync", [SGP, soak({"graph": "random"})], ids=["sgp", "d_psgd"])
def test_it_resumes_equal_to_the_bit_with_the_copy_that_each_rank_had(
    tmp_path: Path, sync: dict[str, Any]
) -> None:
    spec = job(3, sync, optimizer=ADAM, epochs=3)
    spec["checkpoint"] = {"every_steps": 5, "keep": 2}
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, spec, world_size=3) == [0, 0, 0]
    codes = run_ranks(killed, spec, world_size=3, before=die_at_step_18)
    assert -signal.SIGKILL in codes
    refs = checkpoint_refs(killed)
    assert refs[0].step == 15
    assert run_ranks(killed, spec, world_size=3, attempt=2, resume_from=refs) == [0, 0, 0]
    one = checkpoint_files.load(checkpoint_refs(left_alone)[0])
    other = checkpoint_files.load(checkpoint_refs(killed, attempt=2)[0])
    assert len(one.state["gossip"]["copies"]) == 3
    assert_same(one.state, other.state)


@SOAK
def test_another_number_of_ranks_goes_on_from_the_mean_of_all(tmp_path: Path) -> None:
    before = job(3, SGP)
    assert run_ranks(tmp_path, before, world_size=3) == [0, 0, 0]
    ref = checkpoint_refs(tmp_path)[0]
    after = job(2, {"mode": "sgp"}, epochs=3)
    assert run_ranks(tmp_path, after, world_size=2, attempt=2, resume_from=[ref]) == [0, 0]
    assert series(tmp_path, "val/loss", attempt=2)[24] < series(tmp_path, "val/loss")[16]


def test_all_leave_after_the_step_by_which_the_last_has_heard_that_one_is_asked_to(
    tmp_path: Path,
) -> None:
    spec = job(4, {"graph": "custom", "edges": [[0, 1], [1, 2], [2, 3]]}, epochs=40)
    codes = run_ranks(tmp_path, spec, world_size=4, before=_ask_to_leave_at_step_4)
    assert codes[0] == LEFT_EXIT_CODE
    # Asked in step 4; rank 1 hears of it in step 5, rank 2 in step 6, and rank 3 in step 7.
    assert checkpoint_refs(tmp_path)[0].step == 7


def _ask_to_leave_at_step_4(task: RankTask) -> None:
    ask_rank_0_to_leave(task, at_step=4, others_end_at=8)


@pytest.mark.parametrize(
    ("sync", "point"),
    [
        ({"graph": "ring"}, FaultPoint.BEFORE_OPTIMIZER),
        soak({"graph": "custom", "mode": "sgp", "edges": UNEVEN}, FaultPoint.BEFORE_EXCHANGE),
        soak({"graph": "random"}, FaultPoint.STEP_ENDS),
        soak({"graph": "exponential"}, FaultPoint.AFTER_EVALUATION),
    ],
    ids=["d_psgd-optimizer", "sgp-exchange", "random-end", "exponential-evaluation"],
)
def test_a_rank_that_dies_is_replaced_and_the_others_keep_their_copies(
    tmp_path: Path, sync: dict[str, Any], point: FaultPoint
) -> None:
    at_step = 8 if point is FaultPoint.AFTER_EVALUATION else 5
    die = functools.partial(_die, point=point, at_step=at_step)
    spec = job(4, sync)
    assert run_ranks(tmp_path, spec, world_size=4, before=die, recovers=True) == [0] * 4
    assert replaced(tmp_path) == [1]
    assert set(series(tmp_path, "train/loss")) == set(range(1, 17)), "every step is reported once"
    copies = checkpoint_files.load(checkpoint_refs(tmp_path)[0]).state["gossip"]["copies"]
    assert len(copies) == 4
    evaluated = [m for m in frames(tmp_path, kind="metrics") if "val/loss" in m["values"]]
    losses = {m["step"]: m["values"]["val/loss"] for m in evaluated}  # one may be taken again
    assert losses[16] < losses[8]
    assert evaluated[-1]["values"]["train/consensus_distance"] > 0.001, "copies were made equal"


def _die(task: RankTask, point: FaultPoint, at_step: int) -> None:
    if task.rank == 1 and task.incarnation == 0:
        arm(point, lambda: os.kill(os.getpid(), signal.SIGKILL), at_step=at_step)
