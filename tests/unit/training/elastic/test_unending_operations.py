"""A rank dies while it sends a message of many MB. Gloo does not wake the ranks that wait for the
rest of the message. Their training continues in another thread, and nothing is lost."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import Cause, RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from tests.marks import soak
from tests.unit.training.elastic.test_recovery import STEP, die, small
from tests.unit.training.jobs import assert_same, weights
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.prepared.programs import program
from tests.unit.training.ranks import frames, replaced, run_ranks

LARGE = 64 << 20
LOST = 1


def _lose(task: RankTask, point: FaultPoint, step: int | None, folder: Path) -> None:
    if task.rank == LOST and task.incarnation == 0:
        arm(point, _send_and_die, at_step=step)
    elif task.incarnation == 0:
        arm(point, _receive, at_step=step)
    continued = RendezvousHandler._hand_over_if_stuck

    def recorded(self: RendezvousHandler) -> None:
        before = self._training
        continued(self)
        if self._training is not before:
            status = heartbeat.read_status(heartbeat.page_path(task.page_prefix))
            assert status is not None
            if status.training_thread == self._training._native_id:  # `machine_speed` measures it
                (folder / f"continued-{task.rank}").touch()

    RendezvousHandler._hand_over_if_stuck = recorded  # type: ignore[method-assign]


def _send_and_die() -> None:
    message = torch.ones(LARGE, dtype=torch.uint8)
    works = [dist.isend(message, to) for to in range(dist.get_world_size()) if to != LOST]
    assert works
    die()


def _receive() -> None:
    dist.recv(torch.empty(LARGE, dtype=torch.uint8), LOST)


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "point", "step"),
    [
        (2, {}, FaultPoint.BEFORE_OPTIMIZER, STEP),
        soak(3, {}, FaultPoint.BEFORE_EVALUATION, 8),
        soak(2, {"shard": 2}, FaultPoint.BEFORE_OPTIMIZER, STEP),
        (2, {"shard": 2}, FaultPoint.BEFORE_PEER_COPY, 6),
    ],
)
def test_the_ranks_that_wait_for_the_rest_of_a_message_continue(
    num_ranks: int, parallel: dict[str, Any], point: FaultPoint, step: int, tmp_path: Path
) -> None:
    alone, home = tmp_path / "alone", tmp_path / "home"
    for folder in (alone, home):
        folder.mkdir()
    spec = brief(tmp_path, num_ranks, parallel) if parallel else small(num_ranks)
    if parallel:
        spec |= {"checkpoint": {"in_memory": {"every_steps": 3}}}
    assert run_ranks(alone, spec, world_size=num_ranks) == [0] * num_ranks
    before = functools.partial(_lose, point=point, step=step, folder=home)
    codes = run_ranks(home, spec, world_size=num_ranks, before=before, recovers=True)
    assert (codes, replaced(home)) == ([0] * num_ranks, [LOST])
    assert_same(weights(home), weights(alone))
    continued = sorted(path.name for path in home.glob("continued-*"))
    in_copy = point is FaultPoint.BEFORE_PEER_COPY
    others = [f"continued-{rank}" for rank in range(num_ranks) if rank != LOST]
    assert continued == ([] if in_copy else others)


def _lose_twice(task: RankTask, folder: Path) -> None:
    _lose(task, FaultPoint.BEFORE_OPTIMIZER, STEP, folder)
    if task.rank != LOST and task.incarnation == 0:
        arm(FaultPoint.BEFORE_OPTIMIZER, _receive, at_step=STEP + 3)
    elif task.incarnation == 1:
        arm(FaultPoint.BEFORE_OPTIMIZER, _send_and_die, at_step=STEP + 3)


def test_a_rank_continues_in_another_thread_again(tmp_path: Path) -> None:
    alone, home = tmp_path / "alone", tmp_path / "home"
    for folder in (alone, home):
        folder.mkdir()
    assert run_ranks(alone, small(2), world_size=2) == [0, 0]
    before = functools.partial(_lose_twice, folder=home)
    codes = run_ranks(home, small(2), world_size=2, before=before, recovers=True)
    assert (codes, replaced(home)) == ([0, 0], [LOST, LOST])
    assert_same(weights(home), weights(alone))


def test_a_rank_of_a_script_that_waits_for_the_rest_of_a_message_is_lost_as_well(
    tmp_path: Path,
) -> None:
    """Only the thread that waits could continue the script."""
    before = functools.partial(_lose, point=FaultPoint.GROUP_JOINED, step=None, folder=tmp_path)
    codes = run_ranks(
        *(tmp_path, program(tmp_path)),
        world_size=2,
        before=before,
        recovers=True,
        ends_with_error=True,
    )
    assert codes[0] == 1
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == Cause.WORKER_LOST
    assert "gloo did not end the operation" in error["message"]
