"""A model that is divided among ranks learns the same as in a single process."""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.equality import work
from ray_workers.shared.contracts import LEFT_EXIT_CODE, Cause, RankTask
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.loop.trainer import Trainer
from tests.marks import ONE_SET, SOAK, soak, soak_but
from tests.unit.training.elastic.test_recovery import after_own_update, die, once
from tests.unit.training.jobs import assert_same, die_at_step_18, document, series, weights
from tests.unit.training.parallel.test_local_sgd import ask_rank_0_to_leave
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks

EQUAL = 1e-5
"""Limit of the norm of the difference, relative to the norm of the tensor, in fp32."""


def images(num_workers: int, parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Return a job with the digits and a perceptron whose layers can't be divided evenly."""
    options = {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "max_steps": 20}
    spec = document(num_workers, **(options | train)) | {"parallel": parallel}
    return spec | {"model": {"name": "mlp", "width": 33, "num_layers": 2}}


def text(folder: Path, num_workers: int, parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Return a job with a small GPT; its blocks are the units that are gathered."""
    made: dict[str, Any] = work.document(work.write_text(folder), num_workers, parallel, **train)
    return made


def brief(folder: Path, num_workers: int, parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Return a job of 8 steps, including a short batch; `benchmarks equality` runs 20, which take
    long on a small machine."""
    source = work.write_text(folder, num_sentences=250)
    made: dict[str, Any] = work.document(
        source, num_workers, parallel, **({"max_steps": 8} | train)
    )
    return made


def furthest(home: Path, other: Path) -> float:
    """Return the largest relative difference between the tensors of two results."""
    found, expected = weights(home), weights(other)
    assert found.keys() == expected.keys()
    gaps = (
        ((found[name] - tensor).norm() / tensor.norm().clamp_min(1e-12)).item()
        for name, tensor in expected.items()
        if tensor.is_floating_point()
    )
    return max(gaps)


Undisturbed = Callable[..., Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The home of an undisturbed run, created once for each job."""
    homes: dict[str, Path] = {}

    def run(
        make: Callable[..., dict[str, Any]],
        world_size: int,
        parallel: dict[str, Any],
        before: Callable[[RankTask], None] | None = None,
        **options: Any,
    ) -> Path:
        key = repr((make.__name__, world_size, parallel, before, options))
        if key not in homes:
            home = tmp_path_factory.mktemp("undisturbed")
            spec = make(home, world_size, parallel, **options)
            codes = run_ranks(home, spec, world_size=world_size, before=before)
            assert codes == [0] * world_size
            homes[key] = home
        return homes[key]

    return run


@pytest.fixture(scope="module")
def alone(undisturbed: Undisturbed) -> Path:
    """The results of a single process."""
    return undisturbed(text, 1, {})


TRIED = [
    "shard",
    "shard, ZeRO 1",
    "shard, ZeRO 2",
    "tensor",
    "context",
    "pipeline",
    "pipeline, GPipe",
    "pipeline, interleaved",
    "pipeline, zero bubble",
    "data x shard",
    "data x shard, ZeRO 1",
    "data x context",
    "data x pipeline, zero bubble",
    "shard x tensor",
    "shard x pipeline",
    "context x pipeline",
    "data x shard x tensor",
    "shard x tensor x pipeline",
    "data x shard x pipeline",
]
"""The tested meshes; `python -m benchmarks equality` tries all possible ones."""
SHORT = {"shard", "shard, ZeRO 1", "tensor", "context", "pipeline", "data x shard"}
"""Cases for `make test`: one for each axis, and a product of two."""


@pytest.mark.parametrize("mesh", soak_but(TRIED, short=SHORT))
def test_a_gpt_learns_the_same(undisturbed: Undisturbed, mesh: str) -> None:
    assert_learns_the_same(undisturbed, brief, *work.MESHES[mesh])


@SOAK
@pytest.mark.parametrize("mesh", [mesh for mesh in TRIED if work.MESHES[mesh][0] == 2])
def test_a_gpt_learns_the_same_over_twenty_steps(undisturbed: Undisturbed, mesh: str) -> None:
    assert_learns_the_same(undisturbed, text, *work.MESHES[mesh])


def assert_learns_the_same(
    undisturbed: Undisturbed,
    make: Callable[..., dict[str, Any]],
    num_ranks: int,
    parallel: dict[str, Any],
) -> None:
    """Check that the steps have the same metrics in a divided run and in a single process."""
    together, alone = undisturbed(make, num_ranks, parallel), undisturbed(make, 1, {})
    assert furthest(together, alone) < EQUAL
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy", "val/perplexity"):
        told, expected = series(together, key), series(alone, key)
        assert told.keys() == expected.keys()
        assert all(math.isclose(told[s], expected[s], rel_tol=1e-4) for s in told), key


@SOAK
@pytest.mark.parametrize("mesh", ["data x shard", "tensor", "context x pipeline"])
def test_in_fp64_it_is_the_same_to_ten_digits(undisturbed: Undisturbed, mesh: str) -> None:
    together = undisturbed(brief, *work.MESHES[mesh], before=_in_fp64)
    assert {tensor.dtype for tensor in weights(together).values()} == {torch.float64}
    assert furthest(together, undisturbed(brief, 1, {}, before=_in_fp64)) < 1e-10


def _in_fp64(task: RankTask) -> None:
    torch.set_default_dtype(torch.float64)


@SOAK
@pytest.mark.parametrize("zero", [soak(1), 3])
def test_a_share_of_fewer_samples_than_micro_batches_counts_for_what_it_is(
    undisturbed: Undisturbed, zero: int
) -> None:
    """Two and three of five samples, one at a time: all ranks compute the same number of times."""
    options = {"global_batch_size": 5, "micro_batch_size": 1, "max_steps": 4}
    together = undisturbed(brief, 2, {"shard": 2, "zero": zero}, **options)
    alone = undisturbed(brief, 1, {}, **options)
    assert furthest(together, alone) < EQUAL
    for key in ("train/loss", "train/grad_norm"):
        assert series(together, key) == pytest.approx(series(alone, key), rel=1e-4)


@SOAK
@pytest.mark.parametrize("parallel", [soak({"shard": 3}), {"shard": 3, "zero": 2}], ids=["3", "2"])
def test_shares_and_layers_that_do_not_divide_evenly(
    undisturbed: Undisturbed, parallel: dict[str, Any]
) -> None:
    """With micro-batches of 33 samples, 67 samples are divided into three pieces, and 66 into
    two."""
    together = undisturbed(digits, 3, parallel, micro_batch_size=33)
    assert furthest(together, undisturbed(digits, 1, {})) < EQUAL


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        (2, {"pipeline": 2}),
        soak(3, {"pipeline": 3}),
        soak(2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}),
        soak(4, {"shard": 2, "pipeline": 2}),
    ],
    ids=["two", "three", "interleaved", "with shards"],
)
def test_a_resnet_learns_the_same_in_stages(
    undisturbed: Undisturbed, num_ranks: int, parallel: dict[str, Any]
) -> None:
    together, alone = undisturbed(blocks, num_ranks, parallel), undisturbed(blocks, 1, {})
    assert furthest(together, alone) < EQUAL
    for key in ("train/loss", "val/loss", "val/accuracy"):
        told, expected = series(together, key), series(alone, key)
        assert told == pytest.approx(expected, rel=1e-4), key


def blocks(home: Path, num_workers: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Return a job with a network whose stages exchange tensors of different shapes."""
    spec = images(num_workers, parallel, global_batch_size=120, max_steps=15)
    return spec | {"model": {"name": "resnet", "depth": 14, "width": 8}}


@SOAK  # fp16 is, and more
def test_bf16_is_as_good_as_that_of_replicas(undisturbed: Undisturbed) -> None:
    replicas = undisturbed(digits, 2, {}, precision="bf16")
    together = undisturbed(digits, 2, {"shard": 2}, precision="bf16")
    assert furthest(together, replicas) < EQUAL


HALF_SENT = {"param_dtype": "fp16", "reduce_dtype": "fp16"}


@SOAK
@pytest.mark.parametrize("scale", [soak(2.0**16), 2.0**28], ids=["as it is", "too large"])
def test_fp16_is_as_good_as_that_of_replicas(undisturbed: Undisturbed, scale: float) -> None:
    """This includes overflowing gradients, because of which the first steps change nothing on any
    rank."""
    before = functools.partial(_begin_with_scale, scale=scale)
    together = undisturbed(digits, 2, {"shard": 2}, before=before, precision="fp16")
    replicas = undisturbed(digits, 2, {}, before=before, precision="fp16")
    assert furthest(together, replicas) < EQUAL
    norms = series(together, "train/grad_norm").values()
    assert math.isfinite(next(iter(norms))) == (scale == 2.0**16)
    assert math.isfinite(list(norms)[-1])


def _begin_with_scale(task: RankTask, scale: float) -> None:
    made = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(made, init_scale=scale)  # type: ignore[assignment,misc]


@SOAK
@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        (2, {"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 2}),
        (2, {"context": 2, **HALF_SENT}),
        (4, {"shard": 2, "pipeline": 2, **HALF_SENT}),
    ],
    ids=["tensor", "pipeline", "zero bubble", "context", "shard x pipeline"],
)
def test_a_gpt_learns_in_fp16(
    undisturbed: Undisturbed, num_ranks: int, parallel: dict[str, Any]
) -> None:
    together = undisturbed(brief, num_ranks, parallel, precision="fp16")
    whole = undisturbed(brief, 1, {})
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(together, key) == pytest.approx(series(whole, key), rel=0.02), key


SPARED: dict[str, Any] = {
    "optimizer": {"name": "lamb", "lr": 0.01},
    "precision": "fp16",
    "ema": {"decay": 0.9},
}
"""Options that have a state and require the whole model on each rank."""


@ONE_SET
@pytest.mark.parametrize(
    ("train", "compression"),
    [
        (SPARED, None),
        soak({"optimizer": {"name": "lars", "lr": 5.0, "momentum": 0.9}}, None),
        soak({"optimizer": {"name": "adafactor", "lr": 0.01}}, None),
        soak({"precision": "fp16"}, {"name": "fp16"}),
        soak({}, {"name": "bf16"}),
        ({}, {"name": "powersgd", "start_step": 4}),
        soak({}, {"name": "topk", "ratio": 0.05}),
    ],
    ids=["lamb and average", "lars", "adafactor", "fp16", "bf16", "powersgd", "topk"],
)
def test_zero_1_takes_what_replicas_take(
    undisturbed: Undisturbed, train: dict[str, Any], compression: dict[str, Any] | None
) -> None:
    options = {**train, "compression": compression}
    together = undisturbed(compressed, 2, {"shard": 2, "zero": 1}, **options)
    replicas = undisturbed(compressed, 2, {}, **options)
    assert_same(weights(together), weights(replicas))
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy"):
        assert series(together, key) == series(replicas, key), key


def compressed(
    folder: Path,
    num_workers: int,
    parallel: dict[str, Any],
    compression: dict[str, Any] | None,
    **train: Any,
) -> dict[str, Any]:
    spec = images(num_workers, parallel, **train)
    return spec if compression is None else spec | {"sync": {"compression": compression}}


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        soak({"shard": 2}, {"optimizer": {"name": "adamw"}}),
        ({"shard": 2}, {"precision": "fp16"}),
        soak({"shard": 2, "zero": 1}, SPARED),
    ],
    ids=["ZeRO 3", "ZeRO 3 in fp16", "ZeRO 1"],
)
def test_it_resumes_equal_to_the_bit(
    tmp_path: Path, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    spec = images(2, parallel, max_steps=None, **train)
    spec["checkpoint"] = {"every_steps": 5, "keep": 2}
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    assert run_ranks(left_alone, spec, world_size=2) == [0, 0]
    codes = run_ranks(killed, spec, world_size=2, before=die_at_step_18)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(killed)
    assert run_ranks(killed, spec, world_size=2, attempt=2, resume_from=refs) == [0, 0]
    one = checkpoint_files.load(checkpoint_refs(left_alone)[0])
    other = checkpoint_files.load(checkpoint_refs(killed, attempt=2)[0])
    assert_same(one.state, other.state)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        soak((1, {}), (4, {"shard": 2})),
        soak((4, {"shard": 4}), (2, {})),
        soak((2, {"shard": 2}), (3, {"shard": 3})),
        ((2, {"shard": 2, "zero": 1}), (2, {"shard": 2})),
        soak((2, {"shard": 2}), (4, {"shard": 2, "zero": 1})),
    ],
    ids=["one to hybrid", "sharded to replicas", "two to three", "ZeRO 1 to 3", "ZeRO 3 to 1"],
)
def test_a_checkpoint_of_one_mesh_is_gone_on_with_on_another(
    tmp_path: Path,
    undisturbed: Undisturbed,
    first: tuple[int, dict[str, Any]],
    second: tuple[int, dict[str, Any]],
) -> None:
    assert_moves(digits, tmp_path, first, second, undisturbed(digits, 1, {}, **SAVED))


SAVED: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 0.002, "eps": 1e-4},
    "max_steps": 12,
}


def digits(folder: Path, *mesh: Any, **train: Any) -> dict[str, Any]:
    return images(*mesh, **train)


def assert_moves(
    make: Callable[..., dict[str, Any]],
    home: Path,
    first: tuple[int, dict[str, Any]],
    second: tuple[int, dict[str, Any]],
    alone: Path,
) -> None:
    """Check that a job with another mesh that continues after step 6 of the first job ends like a
    single process."""

    def train(name: str, mesh: tuple[int, dict[str, Any]], **options: Any) -> None:
        spec = make(home, *mesh, **SAVED) | {"checkpoint": {"every_steps": 6}}
        spec["init_from"] = {"job": "job-first", "take": "everything"}
        codes = run_ranks(home / name, spec, world_size=mesh[0], **options)
        assert codes == [0] * mesh[0]

    train("first", first)
    (halfway,) = [ref for ref in checkpoint_refs(home / "first") if ref.step == 6]
    train("second", second, init_from=halfway)
    (receipt,) = frames(home / "second", kind="resumed")
    assert (receipt["step"], receipt["optimizer_restored"]) == (6, True)
    assert list(series(home / "second", "train/loss")) == [7, 8, 9, 10, 11, 12]
    expected = weights(alone)
    for name, tensor in weights(home / "second").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def test_who_is_asked_to_leave_does_with_the_checkpoint_of_all(tmp_path: Path) -> None:
    spec = images(2, {"shard": 2}, max_steps=None, epochs=40)
    codes = run_ranks(tmp_path, spec, world_size=2, before=_ask_at_step_4)
    assert codes[0] == LEFT_EXIT_CODE
    assert checkpoint_refs(tmp_path)[0].step == 4


def _ask_at_step_4(task: RankTask) -> None:
    ask_rank_0_to_leave(task, at_step=4, others_end_at=5)


@SOAK
def test_stages_resume_in_fp16(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The loss scale, which does not belong to any stage, is in the checkpoint."""
    parallel, options = {"pipeline": 2}, {"max_steps": 20, "precision": "fp16"}
    spec = text(tmp_path, 2, parallel, **options) | {"checkpoint": {"every_steps": 5}}
    codes = run_ranks(tmp_path, spec, world_size=2, before=die_at_step_18)
    assert codes == [-signal.SIGKILL] * 2
    refs = checkpoint_refs(tmp_path)
    assert run_ranks(tmp_path, spec, world_size=2, attempt=2, resume_from=refs) == [0, 0]
    left_alone = undisturbed(text, 2, parallel, **options)
    assert_same(weights(tmp_path, attempt=2), weights(left_alone))


@SOAK
def test_large_numbers_of_a_table_are_not_rounded(undisturbed: Undisturbed) -> None:
    """Numbers, codes of categories, and targets are never converted to half precision."""
    replicas = undisturbed(prices, 2, {}, precision="fp16")
    together = undisturbed(prices, 2, {"shard": 2, "param_dtype": "fp16"}, precision="fp16")
    for key in ("train/loss", "val/loss"):
        told = series(replicas, key)
        assert series(together, key) == pytest.approx(told, rel=0.03)
    first, *_, last = series(replicas, "val/loss").values()
    assert last < first / 4


def prices(
    folder: Path, num_workers: int, parallel: dict[str, Any], **train: Any
) -> dict[str, Any]:
    """Return a job with numbers above 65,504, and more categories than fp16 can represent as
    integers."""
    rows = [f"{100_000 + 7 * n},k{n % 3000},{200_000 + 7 * n}" for n in range(6000)]
    (folder / "rows.csv").write_text("\n".join(["size,kind,price", *rows]))
    optimizer = {"name": "adamw", "lr": 0.01}
    return {
        "recipe": "tabular_regression",
        "data": {"source": (folder / "rows.csv").as_uri(), "target": "price"},
        "model": {"name": "mlp", "width": 32},
        "train": {"global_batch_size": 200, "epochs": 4, "optimizer": optimizer, **train},
        "resources": {"num_workers": num_workers},
        "parallel": parallel,
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        soak((4, {"shard": 2, "tensor": 2}), (2, {"pipeline": 2})),
        soak((4, {"tensor": 2, "pipeline": 2}), (4, {"shard": 2, "context": 2})),
        ((2, {"pipeline": 2}), (2, {})),
    ],
    ids=["tensor to pipeline", "pipeline to context", "pipeline to replicas"],
)
def test_a_gpt_moves_from_mesh_to_mesh(
    tmp_path: Path,
    undisturbed: Undisturbed,
    first: tuple[int, dict[str, Any]],
    second: tuple[int, dict[str, Any]],
) -> None:
    assert_moves(text, tmp_path, first, second, undisturbed(text, 1, {}, **SAVED))


MENDED = ["data x shard, ZeRO 1", "data x pipeline"]
CULPRITS = [("data x shard", 0), ("data x tensor", 3), ("data x context", 0)]
CULPRITS += [(mesh, rank) for mesh in MENDED for rank in (0, 3)]


@pytest.mark.parametrize(
    ("mesh", "culprit"), [("data x shard", 3), *(soak(*one) for one in CULPRITS)]
)
def test_a_rank_that_is_killed_gets_its_parts_from_its_twin(
    tmp_path: Path, undisturbed: Undisturbed, mesh: str, culprit: int
) -> None:
    world_size, parallel = work.MESHES[mesh]
    die = functools.partial(_die_in_step_7, culprit=culprit)
    spec = brief(tmp_path, world_size, parallel)
    codes = run_ranks(tmp_path, spec, world_size=world_size, before=die, recovers=True)
    assert codes == [0] * world_size
    assert list((tmp_path / "attempt-1" / "spool").glob(f"r{culprit}.1.*")), "no rank was replaced"
    left_alone = undisturbed(brief, world_size, parallel)
    assert_same(weights(tmp_path), weights(left_alone))
    for key in ("train/loss", "val/loss"):
        assert once(tmp_path, key) == series(left_alone, key)


@SOAK
@pytest.mark.parametrize(
    ("parallel", "train"),
    [({"shard": 2, "zero": 1}, SPARED), soak({"shard": 2}, {"precision": "fp16"})],
    ids=["ZeRO 1", "ZeRO 3"],
)
def test_a_twin_gives_the_loss_scale_and_the_average_too(
    tmp_path: Path, undisturbed: Undisturbed, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    die = functools.partial(_die_in_step_7, culprit=1)
    spec = brief(tmp_path, 4, parallel, **train)
    assert run_ranks(tmp_path, spec, world_size=4, before=die, recovers=True) == [0] * 4
    assert replaced(tmp_path) == [1]
    assert_same(weights(tmp_path), weights(undisturbed(brief, 4, parallel, **train)))


@SOAK
@pytest.mark.parametrize(
    "parallel", [{"shard": 2}, soak({"shard": 2, "zero": 1}), soak({"tensor": 2})], ids=str
)
def test_twins_that_differ_after_a_handover_go_back_to_the_checkpoint(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """Rank 0 gets its parts from rank 2. Rank 3 has a wrong bit in one of the other parts."""
    spec = brief(tmp_path, 4, parallel)
    codes = run_ranks(tmp_path, spec, world_size=4, before=_die_beside_a_wrong_bit, recovers=True)
    assert codes == [1] * 4
    for rank in range(4):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert error["cause"] == Cause.WORKER_LOST
        assert "had different copies of the weights" in error["message"]


def _die_beside_a_wrong_bit(task: RankTask) -> None:
    _die_in_step_7(task, culprit=0)
    if task.rank == 3:
        arm_with(FaultPoint.GROUP_JOINED, _flip)


def _flip(trainer: Trainer) -> None:
    parts = trainer.strategy._parts  # type: ignore[attr-defined]
    if parts is not None:
        first = next(iter(parts["parts"].values()))
        first.view(torch.int32).view(-1)[0] ^= 1


def _die_in_step_7(task: RankTask, culprit: int) -> None:
    if task.rank == culprit and task.incarnation == 0:
        arm(FaultPoint.DATA_LOADED, die, at_step=7)


@SOAK
@pytest.mark.parametrize("zero", [1, 3])
def test_a_rank_that_dies_while_the_mesh_is_made_is_replaced(
    tmp_path: Path, undisturbed: Undisturbed, zero: int
) -> None:
    parallel = {"shard": 2} if zero == 3 else {"shard": 2, "zero": zero}
    spec = brief(tmp_path, 4, parallel)
    codes = run_ranks(tmp_path, spec, world_size=4, before=_die_making_the_mesh, recovers=True)
    assert codes == [0] * 4
    assert list((tmp_path / "attempt-1" / "spool").glob("r2.1.*")), "no rank was replaced"
    assert_same(weights(tmp_path), weights(undisturbed(brief, 4, parallel)))


def _die_making_the_mesh(task: RankTask) -> None:
    if task.rank == 2 and task.incarnation == 0:
        arm(FaultPoint.BEFORE_MESH, die)


@SOAK
def test_parts_that_nobody_has_any_more_end_the_attempt(tmp_path: Path) -> None:
    """Both holders of a part are killed, so the remaining parts are useless."""
    spec = brief(tmp_path, 4, {"shard": 2})
    die_both = functools.partial(_die_with_the_twin, folder=tmp_path)
    codes = run_ranks(tmp_path, spec, world_size=4, before=die_both, recovers=True)
    assert codes == [1] * 4
    (error,) = frames(tmp_path, rank=0, kind="error")
    assert error["cause"] == Cause.WORKER_LOST
    assert "the job resumes from its latest checkpoint" in error["message"]


def _die_with_the_twin(task: RankTask, folder: Path) -> None:
    if task.rank in (1, 3) and task.incarnation == 0:
        arm(
            FaultPoint.DATA_LOADED,
            functools.partial(_die_together, task.rank, folder),
            at_step=7,
        )


def _die_together(rank: int, folder: Path) -> None:
    """Otherwise one of them would pass on its part before the other dies."""
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < 2:
        time.sleep(0.001)
    die()


@SOAK
def test_half_a_step_of_zero_1_is_no_state_to_go_on_from(tmp_path: Path) -> None:
    """In each group, a rank dies before it has sent its part of the new weights. The remaining
    ranks have their own new parts, and the previous parts of the others."""
    spec = brief(tmp_path, 4, {"shard": 2, "zero": 1})
    die_both = functools.partial(_die_before_sending, folder=tmp_path)
    codes = run_ranks(tmp_path, spec, world_size=4, before=die_both, recovers=True)
    assert codes == [1] * 4
    (error,) = frames(tmp_path, rank=1, kind="error")
    assert error["cause"] == Cause.WORKER_LOST
    assert "the job resumes from its latest checkpoint" in error["message"]


def _die_before_sending(task: RankTask, folder: Path) -> None:
    if task.rank in (0, 3) and task.incarnation == 0:
        act = functools.partial(_die_together, task.rank, folder)
        after_own_update(7, act)


@SOAK
def test_who_is_left_with_half_a_step_takes_the_whole_one_of_its_twin(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    parallel = {"shard": 2, "zero": 1}
    spec = brief(tmp_path, 4, parallel)
    codes = run_ranks(tmp_path, spec, world_size=4, before=_die_alone_before_sending, recovers=True)
    assert codes == [0] * 4
    assert_same(weights(tmp_path), weights(undisturbed(brief, 4, parallel)))


def _die_alone_before_sending(task: RankTask) -> None:
    if task.rank == 0 and task.incarnation == 0:
        after_own_update(7)
