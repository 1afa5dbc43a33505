"""Checkpoints of a divided model, while its ranks die, leave or run out of disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.equality import work
from ray_workers.shared.contracts import Cause, RankTask
from ray_workers.training.checkpoint import checkpoint_files, save_group
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.marks import soak
from tests.unit.training.checkpoint.test_checkpoint_files import cut_short, folder_of, lose
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import assert_same, series, weights
from tests.unit.training.loop.test_trainer import save_at_once
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks

EVERY, LAST = 4, 8


def job(folder: Path, mesh: str) -> tuple[int, dict[str, Any]]:
    world_size, parallel = work.MESHES[mesh]
    spec = brief(folder, world_size, parallel) | {"checkpoint": {"every_steps": EVERY, "keep": 9}}
    return world_size, spec


def kill(task: RankTask, culprit: int, point: FaultPoint) -> None:
    save_group.GRACE_S = 0.5
    if task.rank == culprit and task.incarnation == 0:
        arm(point, die, at_step=EVERY)


@pytest.mark.parametrize(
    ("culprit", "point"),
    [
        soak(3, FaultPoint.SHARE_WRITTEN),
        soak(1, FaultPoint.BEFORE_WRITE),
        soak(2, FaultPoint.SAVE_BEGUN),
        (0, FaultPoint.BEFORE_MANIFEST),
    ],
)
def test_a_rank_that_dies_before_the_manifest_costs_only_this_checkpoint(
    tmp_path: Path, culprit: int, point: FaultPoint
) -> None:
    world_size, spec = job(tmp_path, "data x shard")
    before = functools.partial(kill, culprit=culprit, point=point)
    codes = run_ranks(tmp_path, spec, world_size=world_size, before=before, recovers=True)
    assert codes == [0] * world_size
    assert replaced(tmp_path) == [culprit]
    refs = checkpoint_refs(tmp_path)
    # If the group broke right after the save had begun, the ranks have begun it again.
    assert [ref.step for ref in refs] in ([LAST], [LAST, EVERY])
    for ref in refs:
        assert checkpoint_files.load(ref).saved.step == ref.step
    left = sorted(path.name for path in (tmp_path / "attempt-1" / "checkpoints").iterdir())
    assert left == sorted(ref.url.rpartition("/")[2] for ref in refs)


def fill_the_disk_of_rank_1(task: RankTask) -> None:
    def fail() -> None:
        raise OSError(28, os.strerror(28))

    if task.rank == 1:
        arm(FaultPoint.BEFORE_WRITE, fail, at_step=EVERY)


def test_a_full_disk_on_one_rank_costs_this_checkpoint(tmp_path: Path) -> None:
    world_size, spec = job(tmp_path, "shard")
    codes = run_ranks(tmp_path, spec, world_size=world_size, before=fill_the_disk_of_rank_1)
    assert codes == [0] * world_size
    assert [ref.step for ref in checkpoint_refs(tmp_path)] == [LAST]
    stalls = series(tmp_path, "perf/checkpoint_stall_s")
    assert len(stalls) >= 1
    told = frames(tmp_path, rank=1, kind="metrics")
    assert not any("perf/checkpoint_stall_s" in one["values"] for one in told)


def _damaged(tmp_path: Path, damage: Callable[[Path], None]) -> tuple[dict[str, Any], str]:
    """Train on two shards, and damage the share of rank 1 in the newest checkpoint. Returns the
    document and the name of the damaged file."""
    world_size, spec = job(tmp_path, "shard")
    assert run_ranks(tmp_path, spec, world_size=world_size) == [0, 0]
    newest, *_ = checkpoint_refs(tmp_path)
    share = sorted(folder_of(newest).glob("*.safetensors"))[1]
    damage(share)
    return spec, share.name


@pytest.mark.parametrize("damage", [lose, cut_short])
def test_a_group_resumes_from_the_last_checkpoint_with_all_shares(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    spec, name = _damaged(tmp_path, damage)
    refs = checkpoint_refs(tmp_path)
    assert [ref.step for ref in refs] == [LAST, EVERY]
    assert run_ranks(tmp_path, spec, world_size=2, attempt=2, resume_from=refs) == [0, 0]
    (receipt,) = frames(tmp_path, attempt=2, kind="resumed")
    (passed_over,) = receipt["passed_over"]
    assert (receipt["step"], passed_over["step"]) == (EVERY, LAST)
    assert name in passed_over["why"]
    assert_same(weights(tmp_path, attempt=2), weights(tmp_path))


@pytest.mark.parametrize("damage", [lose, soak(cut_short)])
def test_a_job_that_names_a_checkpoint_without_all_shares_ends_with_the_fix(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    spec, name = _damaged(first, damage)
    spec["init_from"] = {"job": "job-first", "step": LAST}
    newest, *older = checkpoint_refs(first)
    codes = run_ranks(second, spec, world_size=2, init_from=newest, older=older)
    assert codes == [1, 1]
    for rank in range(2):
        (error,) = frames(second, rank=rank, kind="error")
        assert error["cause"] == Cause.BAD_DATA
        assert name in error["message"]
        assert error["message"].endswith(f"set init_from.step to {EVERY}")


def test_an_interval_of_its_own_choice_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    world_size, spec = job(tmp_path, "shard")
    spec["checkpoint"] = {"every_steps": "auto", "keep": 99}
    assert run_ranks(tmp_path, spec, world_size=world_size, before=save_at_once) == [0, 0]
    steps = [ref.step for ref in reversed(checkpoint_refs(tmp_path))]
    assert (steps[0], steps[-1]) == (1, LAST)
    chosen = series(tmp_path, "perf/checkpoint_every_steps")
    assert all(every >= 1 for every in chosen.values())
    assert chosen
