"""A rank of a group on pretended GPUs dies and the others continue: the weights are the same as
without the loss. The operations follow the rules of NCCL (`tests.fakes.pretend_nccl`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause, RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.elastic import process_group
from tests.fakes import pretend_gpu, pretend_nccl
from tests.marks import SOAK, soak
from tests.unit.training.elastic.test_recovery import (
    POINTS,
    RANK_0_ONLY,
    Fault,
    assert_same,
    small,
)
from tests.unit.training.elastic.test_resizing import Resized, assert_learned_the_same
from tests.unit.training.ranks import frames, replaced, run_ranks
from tests.unit.training.test_pretend_gpu import (
    RESNET,
    TWO,
    job,
    sources,  # noqa: F401
    with_data,
)


class OnGpu:
    """Installs the pretended GPU, and then prepares a fault."""

    def __init__(self, then: Callable[[RankTask], None] | None = None) -> None:
        self.then = then

    def __call__(self, task: RankTask) -> None:
        pretend_nccl.install()
        if self.then is not None:
            self.then(task)


def train(
    home: Path,
    document: dict[str, Any],
    fault: Callable[[RankTask], None] | None = None,
    **more: Any,
) -> list[int | None]:
    num = document["resources"]["num_workers"]
    return run_ranks(
        home, document, world_size=num, device=pretend_gpu.NAME, before=OnGpu(fault), **more
    )


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
    sources: dict[str, str],  # noqa: F811
) -> Callable[[str], Path]:
    """The home of a run without faults, created once for each kind of group."""

    @functools.cache
    def run(kind: str) -> Path:
        home = tmp_path_factory.mktemp("undisturbed")
        document = with_data(KINDS[kind], sources)
        assert train(home, document) == [0] * document["resources"]["num_workers"]
        return home

    return run


KINDS: dict[str, dict[str, Any]] = {
    "replicated": small(2),
}


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (0, "in the backward pass"),
        *(soak(0, point) for point in sorted(POINTS.keys() - {"in the backward pass"})),
        *(soak(1, point) for point in sorted(POINTS.keys() - RANK_0_ONLY)),
    ],
)
def test_a_lost_rank_of_a_group_on_gpus_is_replaced(
    rank: int, point: str, tmp_path: Path, undisturbed: Callable[[str], Path]
) -> None:
    codes = train(tmp_path, KINDS["replicated"], Fault(rank, point), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0], [rank])
    assert_same(tmp_path, undisturbed("replicated"))


KINDS |= {
    "exact": small(2) | {"elastic": {"min_workers": 1, "exact": True}},
    "running means": job(
        *(RESNET, TWO),
        max_steps=16,
        global_batch_size=200,  # as in `small`, an epoch has 8 steps
        optimizer={"name": "sgd", "momentum": 0.9},
    ),
    "bf16 and clipping": small(2, precision="bf16", max_grad_norm=0.5, ema={"decay": 0.9}),
    "fp16": small(2, precision="fp16"),
}
EVERYWHERE = sorted(POINTS.keys() - RANK_0_ONLY)
MATRIX = [(kind, point) for kind in sorted(KINDS.keys() - {"replicated"}) for point in EVERYWHERE]


@pytest.mark.parametrize(("kind", "point"), [soak(*each) for each in MATRIX])
def test_each_kind_of_group_on_gpus_replaces_a_lost_rank(
    kind: str,
    point: str,
    tmp_path: Path,
    undisturbed: Callable[[str], Path],
    sources: dict[str, str],  # noqa: F811
) -> None:
    rank = KINDS[kind]["resources"]["num_workers"] - 1
    document = with_data(KINDS[kind], sources)
    codes = train(tmp_path, document, Fault(rank, point), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0] * (rank + 1), [rank])
    assert_same(tmp_path, undisturbed(kind))


ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered"
LAUNCH_FAILURE = 719, "unspecified launch failure"
ECC = 214, "uncorrectable ECC error encountered"
ASSERT = 710, "device-side assert triggered"


class DeviceFault:
    """The GPU of one rank fails in step 5; its first process can't use it any longer."""

    def __init__(self, rank: int, error: tuple[int, str], point: FaultPoint) -> None:
        self.rank, self.error, self.point = rank, error, point

    def __call__(self, task: RankTask) -> None:
        if task.rank == self.rank and task.incarnation == 0:
            arm(self.point, functools.partial(pretend_gpu.fail, *self.error), at_step=5)


@pytest.mark.parametrize(
    ("rank", "error", "point"),
    [
        (1, ILLEGAL_ADDRESS, FaultPoint.BACKWARD_DONE),
        *(
            soak(rank, error, point)
            for rank in (0, 1)
            for error in (ILLEGAL_ADDRESS, LAUNCH_FAILURE, ECC)
            for point in (
                FaultPoint.DATA_LOADED,
                FaultPoint.BEFORE_EXCHANGE,
                FaultPoint.BEFORE_OPTIMIZER,
                FaultPoint.STEP_ENDS,
            )
        ),
    ],
)
def test_a_rank_that_can_not_use_its_gpu_is_replaced(
    rank: int,
    error: tuple[int, str],
    point: FaultPoint,
    tmp_path: Path,
    undisturbed: Callable[[str], Path],
) -> None:
    codes = train(tmp_path, KINDS["replicated"], DeviceFault(rank, error, point), recovers=True)
    assert (codes, replaced(tmp_path)) == ([0, 0], [rank])
    (report,) = frames(tmp_path, rank=rank, kind="error")
    assert report["cause"] == Cause.WORKER_LOST
    said = f"a process can't use its GPU after this error: CUDA error: {error[1]}"
    assert report["message"] == said
    assert_same(tmp_path, undisturbed("replicated"))


@SOAK
def test_a_failed_assertion_in_a_kernel_is_the_users_error(tmp_path: Path) -> None:
    fault = DeviceFault(1, ASSERT, FaultPoint.BACKWARD_DONE)
    codes = train(tmp_path, KINDS["replicated"], fault, recovers=True, ends_with_error=True)
    assert codes[1] == 1
    assert replaced(tmp_path) == []
    (report,) = frames(tmp_path, rank=1, kind="error")
    assert report["cause"] == Cause.USER_ERROR
    assert "device-side assert triggered" in report["message"]


@SOAK
def test_a_survivor_whose_kernel_asserts_on_undefined_values_is_replaced_too(
    tmp_path: Path, undisturbed: Callable[[str], Path]
) -> None:
    codes = train(tmp_path, KINDS["three ranks"], _assert_in_broken_group, recovers=True)
    assert codes == [0] * 3
    assert sorted(replaced(tmp_path)) == [1, 2]
    (report,) = frames(tmp_path, rank=1, kind="error")
    assert report["cause"] == Cause.WORKER_LOST
    assert_same(tmp_path, undisturbed("three ranks"))


KINDS["three ranks"] = small(3)


def _assert_in_broken_group(task: RankTask) -> None:
    """Rank 2 dies; rank 1 computes with undefined results of its aborted operations."""
    Fault(2, "in the backward pass")(task)
    if task.rank == 1 and task.incarnation == 0:
        arm(FaultPoint.BACKWARD_DONE, _assert_if_broken, at_step=5)


def _assert_if_broken() -> None:
    if process_group.is_broken():
        pretend_gpu.fail(*ASSERT)


@pytest.mark.parametrize("lost", [1, soak(0)])
def test_a_group_on_gpus_shrinks_to_one_rank_and_grows_again(
    lost: int, tmp_path: Path, undisturbed: Callable[[str], Path]
) -> None:
    leash = [(8, 1), (14, 2)]
    group = Resized(tmp_path, KINDS["replicated"], 2, leash, OnGpu(), device=pretend_gpu.NAME)
    try:
        group.gang.start()
        group.until_step(4)
        group.lose(lost)
        group.until_step(8)
        group.gain()
        group.gang.wait(recovers=False)
        codes = [process.exitcode for process in group.gang.processes]
        assert codes == [-9 if index == lost else 0 for index in range(3)]
    finally:
        group.gang.kill()
    assert_learned_the_same(tmp_path, undisturbed("replicated"))
