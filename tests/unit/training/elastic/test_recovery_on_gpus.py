"""A rank of a group on pretended GPUs dies and the others continue: the weights are the same as
without the loss. The operations follow the rules of NCCL (`tests.fakes.pretend_nccl`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import RankTask
from tests.fakes import pretend_gpu, pretend_nccl
from tests.marks import soak
from tests.unit.training.elastic.test_recovery import (
    POINTS,
    RANK_0_ONLY,
    Fault,
    assert_same,
    small,
)
from tests.unit.training.elastic.test_resizing import Resized, assert_learned_the_same
from tests.unit.training.ranks import replaced, run_ranks
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
    "running means": job(RESNET, TWO, max_steps=16, optimizer={"name": "sgd", "momentum": 0.9}),
    "bf16 and clipping": small(2, precision="bf16", max_grad_norm=0.5, ema={"decay": 0.9}),
    "fp16": small(2, precision="fp16"),
}
EVERYWHERE = sorted(POINTS.keys() - RANK_0_ONLY)
MATRIX = [(kind, point) for kind in sorted(KINDS.keys() - {"replicated"}) for point in EVERYWHERE]
IN_TEST = {
    ("running means", "in the backward pass"),
}


@pytest.mark.parametrize(
    ("kind", "point"), [each if each in IN_TEST else soak(*each) for each in MATRIX]
)
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
