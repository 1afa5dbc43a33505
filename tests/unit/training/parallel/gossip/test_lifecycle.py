"""Gossip during the life of a job: resuming, changes in size, leaving, and ranks that die."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import LEFT_EXIT_CODE, RankTask
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.gossip.mixing import FlatCopy, Mixing
from tests.marks import ONE_SET, SOAK, soak
from tests.unit.training.jobs import assert_same, die_at_step_18, series
from tests.unit.training.parallel.gossip.test_synchronous import THREE, UNEVEN, job
from tests.unit.training.parallel.test_local_sgd import ask_rank_0_to_leave
from tests.unit.training.ranks import (
    DEADLINE_S,
    checkpoint_refs,
    frames,
    replaced,
    run_in_group,
    run_ranks,
)

ADAM = {"name": "adamw", "lr": 0.003}
SGP = {"mode": "sgp", "graph": "custom", "edges": THREE}


@SOAK
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
    # Asked in step 4; rank 1 learns of it in step 5, rank 2 in step 6, and rank 3 in step 7.
    assert checkpoint_refs(tmp_path)[0].step == 7


def _ask_to_leave_at_step_4(task: RankTask) -> None:
    ask_rank_0_to_leave(task, at_step=4, others_end_at=8)


HUB = [[0, 1], [1, 2], [1, 3]]
"""All ranks are neighbours of rank 1, which dies."""


@ONE_SET
@pytest.mark.parametrize(
    ("sync", "point"),
    [
        ({"graph": "custom", "edges": HUB}, FaultPoint.BEFORE_OPTIMIZER),
        ({"graph": "custom", "mode": "sgp", "edges": UNEVEN}, FaultPoint.BEFORE_EXCHANGE),
        ({"mode": "ad_psgd", "graph": "ring"}, FaultPoint.STEP_BEGINS),
        soak({"graph": "ring"}, FaultPoint.BEFORE_OPTIMIZER),
        soak({"graph": "random"}, FaultPoint.STEP_ENDS),
        soak({"graph": "exponential"}, FaultPoint.AFTER_EVALUATION),
    ],
    ids=["hub-optimizer", "sgp-exchange", "ad_psgd", "ring", "random-end", "exponential"],
)
def test_when_a_rank_dies_the_others_train_on_until_its_replacement_is_there(
    tmp_path: Path, sync: dict[str, Any], point: FaultPoint
) -> None:
    at_step = 8 if point is FaultPoint.AFTER_EVALUATION else 5
    die = functools.partial(_die, point=point, at_step=at_step)
    spec = job(4, sync)
    assert run_ranks(tmp_path, spec, world_size=4, before=die, goes_on=True) == [0] * 4
    assert replaced(tmp_path) == [1]
    sizes = [int(line) for line in (tmp_path / "sizes").read_text().split()]
    assert sizes == [4, 3, 4], "ranks in the groups that rank 0 was in"
    assert set(series(tmp_path, "train/loss")) == set(range(1, 17)), "every step is reported once"
    copies = checkpoint_files.load(checkpoint_refs(tmp_path)[0]).state["gossip"]["copies"]
    assert len(copies) == 4
    assert sum(copy["push_weight"] for copy in copies) == pytest.approx(4.0)
    evaluated = [m for m in frames(tmp_path, kind="metrics") if "val/loss" in m["values"]]
    losses = {m["step"]: m["values"]["val/loss"] for m in evaluated}  # one may be repeated
    assert losses[16] < losses[8]
    assert evaluated[-1]["values"]["train/consensus_distance"] > 0.001, "copies were made equal"


def _die(task: RankTask, point: FaultPoint, at_step: int) -> None:
    """Make rank 1 die once; the others wait in a later step until it is replaced."""
    if task.incarnation:
        return
    if task.rank == 1:
        arm(point, lambda: os.kill(os.getpid(), signal.SIGKILL), at_step=at_step)
        return
    arm(FaultPoint.STEP_BEGINS, functools.partial(_await_round, task, 2), at_step=12)
    if task.rank == 0:
        sizes = Path(task.page_prefix).parents[2] / "sizes"
        arm_with(FaultPoint.RESTORED, functools.partial(_note_size, sizes))


def _await_round(task: RankTask, number: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while heartbeat.announced(task.page_prefix).generation < number:
        assert time.monotonic() < deadline, "no rank was added"
        time.sleep(0.005)


def _note_size(path: Path, trainer: Trainer) -> None:
    with path.open("a") as file:
        file.write(f"{trainer.world_size}\n")


def test_push_weights_sum_to_the_ranks_again_where_some_were_lost() -> None:
    run_in_group(_restore_push_weights, 3)


def _restore_push_weights(rank: int) -> None:
    parameter = torch.ones(4)
    mixing = Mixing(FlatCopy([parameter]), pushes=True)
    mixing.push_weight = [0.5, 0.25, 1.0][rank]
    mixing.make_whole(3)
    assert mixing.push_weight == pytest.approx([6 / 7, 3 / 7, 12 / 7][rank])
    before = mixing.push_weight = mixing.push_weight * (1 + 1e-9)
    mixing.make_whole(3)
    assert mixing.push_weight == before, "a resumed job would not be equal to the bit"
