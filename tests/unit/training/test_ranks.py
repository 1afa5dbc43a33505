"""The test harness tolerates faults that are not caused by dray."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest

from ray_workers.shared.contracts import RankTask
from tests.unit.training.jobs import document
from tests.unit.training.ranks import frames, run_in_group, run_ranks


def test_a_run_in_which_a_rank_segfaults_is_told_of_and_made_again(tmp_path: Path) -> None:
    spec = document(2, max_steps=2)
    crash = functools.partial(_crash_once, tmp_path / "crashed")
    with pytest.warns(UserWarning, match=r"made again: process \d+ was killed by SIGSEGV"):
        assert run_ranks(tmp_path / "home", spec, world_size=2, before=crash) == [0, 0]
    assert [frame["step"] for frame in frames(tmp_path / "home", kind="metrics")][:2] == [1, 2]
    assert not frames(tmp_path / "home", rank=1, kind="error")


def test_so_is_a_part_of_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="made again"):
        run_in_group(_crash_or_pass, 2, tmp_path / "crashed")


def _crash_once(mark: Path, task: RankTask) -> None:
    _crash_or_pass(task.rank, mark)


def _crash_or_pass(rank: int, mark: Path) -> None:
    if rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
