"""A rank of a prepared script on pretended GPUs dies: no step is lost, and the result is bitwise
equal. The operations follow the rules of NCCL (`tests.fakes.pretend_nccl`)."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import RankTask
from ray_workers.training.elastic import process_group
from tests.fakes import pretend_gpu, pretend_nccl
from tests.marks import SOAK, soak_but
from tests.unit.training.prepared.programs import DEFAULTS, assert_same, program, run
from tests.unit.training.prepared.test_prepared_recovery import CASES, POINTS
from tests.unit.training.ranks import replaced, run_ranks

run_on_gpus = functools.partial(run, before=pretend_nccl.install, device=pretend_gpu.NAME)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    @functools.cache
    def state(world_size: int, start: str = DEFAULTS["START"]) -> list[Any]:
        return run_on_gpus(tmp_path_factory.mktemp("undisturbed"), world_size, START=start)

    return state


@pytest.mark.parametrize("case", soak_but(CASES, short=["before a backward pass, rank 1 of 2"]))
def test_a_rank_on_a_gpu_is_killed(
    tmp_path: Path, undisturbed: Callable[..., list[Any]], case: str
) -> None:
    point, where = case.rsplit(", ", 1)
    rank, world_size = (int(word) for word in where.split() if word.isdigit())
    options = {name: text.format(rank=rank) for name, text in POINTS[point].items()}
    state = run_on_gpus(tmp_path, world_size, **options)
    assert replaced(tmp_path) == [rank]
    assert_same(state, undisturbed(world_size, options.get("START", DEFAULTS["START"])))


OWN = "torch.distributed.all_reduce(torch.ones(1, device=DEVICE))"
NOT_ABORTED, ABORTED = 7, 9


@SOAK
def test_the_scripts_own_operation_is_not_aborted(tmp_path: Path) -> None:
    """Its result would be undefined, and the script would use it."""
    own = f"lambda step: (die(1, step == 7), {OWN})"
    codes = run_ranks(
        tmp_path,
        program(tmp_path, DEVICE=repr(pretend_gpu.NAME), AFTER_STEP=own),
        world_size=2,
        device=pretend_gpu.NAME,
        before=_exit_when_asked_to_abort,
        recovers=True,
        ends_with_error=True,
    )
    assert codes[0] == NOT_ABORTED


def _exit_when_asked_to_abort(task: RankTask) -> None:
    """Rank 0 waits in its own operation until the watching thread has looked at it twice."""
    pretend_nccl.install()
    abort, asked = process_group.abort, itertools.count(1)

    def counted(is_due: Callable[[], bool] = lambda: True) -> None:
        abort(is_due)
        if next(asked) == 2:
            os._exit(ABORTED if process_group.is_broken() else NOT_ABORTED)

    if task.rank == 0:
        process_group.abort = counted  # type: ignore[assignment]
