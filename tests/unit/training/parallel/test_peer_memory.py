"""A rank of a divided model without replicas is replaced from the memory of another rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.marks import soak
from tests.unit.training.elastic.test_recovery import die, once
from tests.unit.training.jobs import assert_same, series, weights
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import replaced, run_ranks

STEP = 7
EVERY_3 = {"in_memory": {"every_steps": 3}}
OFF = {"in_memory": "off"}
IN_STEP = [
    FaultPoint.STEP_BEGINS,
    FaultPoint.DATA_LOADED,
    FaultPoint.SHARE_BEGINS,
    FaultPoint.BEFORE_EXCHANGE,
    FaultPoint.BACKWARD_DONE,
    FaultPoint.BEFORE_OPTIMIZER,
    FaultPoint.AFTER_OPTIMIZER,
    FaultPoint.STEP_ENDS,
]
IN_COPY = [FaultPoint.BEFORE_PEER_COPY, FaultPoint.PEER_COPY_SENT]
"""Points in the copy of the state after step 6."""
OF_STEP = {point: 6 if point in IN_COPY else STEP for point in IN_STEP + IN_COPY}
ZERO_1 = {"ema": {"decay": 0.9}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the results of jobs that keep no copies and lose no rank."""

    @functools.cache
    def run(num_ranks: int, parallel: tuple[tuple[str, Any], ...], has_ema: bool) -> Path:
        home = tmp_path_factory.mktemp("uninterrupted")
        options = ZERO_1 if has_ema else {}
        spec = brief(home, num_ranks, dict(parallel), **options) | {"checkpoint": OFF}
        assert run_ranks(home, spec, world_size=num_ranks) == [0] * num_ranks
        return home

    return run


def kill(task: RankTask, *, rank: int, point: FaultPoint, step: int) -> None:
    if task.rank == rank and task.incarnation == 0:
        arm(point, die, at_step=step)


def assert_equal_end(home: Path, alone: Path) -> None:
    assert_same(weights(home), weights(alone))
    for key in ("train/loss", "val/loss"):
        assert once(home, key) == series(alone, key)


MESHES = {
    "2 shards": (2, {"shard": 2}),
    "3 shards": (3, {"shard": 3}),
    "ZeRO 1": (2, {"shard": 2, "zero": 1}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"context": 2}),
    "shard x pipeline": (4, {"shard": 2, "pipeline": 2}),
}
QUICK = [
    ("2 shards", FaultPoint.DATA_LOADED, 0),
    ("3 shards", FaultPoint.AFTER_OPTIMIZER, 1),
    ("ZeRO 1", FaultPoint.AFTER_OPTIMIZER, 1),
    ("pipeline", FaultPoint.BEFORE_PEER_COPY, 1),
]
ALL = [
    (mesh, point, rank)
    for mesh, (size, _) in MESHES.items()
    for point in OF_STEP
    for rank in range(size)
]


@pytest.mark.parametrize(
    ("mesh", "point", "rank"), [*QUICK, *(soak(*one) for one in ALL if one not in QUICK)]
)
def test_a_killed_rank_gets_its_share_from_its_keeper(
    tmp_path: Path, uninterrupted: Callable[..., Path], mesh: str, point: FaultPoint, rank: int
) -> None:
    num_ranks, parallel = MESHES[mesh]
    is_zero_1 = mesh == "ZeRO 1"
    spec = brief(tmp_path, num_ranks, parallel, **(ZERO_1 if is_zero_1 else {}))
    fault = functools.partial(kill, rank=rank, point=point, step=OF_STEP[point])
    codes = run_ranks(
        *(tmp_path, spec | {"checkpoint": EVERY_3}),
        world_size=num_ranks,
        before=fault,
        recovers=True,
    )
    assert codes == [0] * num_ranks
    assert replaced(tmp_path) == [rank]
    assert_equal_end(tmp_path, uninterrupted(num_ranks, tuple(parallel.items()), is_zero_1))
