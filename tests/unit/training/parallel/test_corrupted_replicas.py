"""One rank's state is corrupted, and the next comparison of the replicas finds what a plain
comparison of all states finds."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.equality import work
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.mesh_shape import MeshShape
from ray_workers.training import devices
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.core.schedule import LearningRates
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.model_parallel.model_parallel import ModelParallel
from tests.marks import FRESH_SEEDS, soak, soak_but
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import document, series
from tests.unit.training.ranks import frames, run_ranks

EVERY, NUM_STEPS = 2, 6


def images(folder: Path, num_workers: int, more: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {**document(num_workers, epochs=1, max_steps=NUM_STEPS, **train), **more}


def text(folder: Path, num_workers: int, more: dict[str, Any], **train: Any) -> dict[str, Any]:
    source = work.write_text(folder, num_sentences=250)
    return dict(work.document(source, num_workers, more["parallel"], max_steps=NUM_STEPS, **train))


Made = tuple[Callable[..., dict[str, Any]], int, dict[str, Any], dict[str, Any]]
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}}
STRATEGIES: dict[str, Made] = {
    "ddp": (images, 3, {}, {"max_grad_norm": 0.5}),
    "ddp of 2": (images, 2, {}, {}),
    "ema, micro-batches": (images, 3, {}, {"ema": {"decay": 0.9}, "micro_batch_size": 16}),
    "fp16": (images, 3, {}, {"precision": "fp16"}),
    "bf16": (images, 3, {}, {"precision": "bf16"}),
    "exact": (images, 3, {"elastic": {"min_workers": 1, "exact": True}}, {}),
    "topk": (images, 3, {"sync": {"compression": {"name": "topk"}}}, SGD),
    "powersgd": (images, 3, {"sync": {"compression": {"name": "powersgd"}}}, {}),
    "zero 1": (images, 6, {"parallel": {"data": 3, "shard": 2, "zero": 1}}, {}),
    "data x shard": (images, 6, {"parallel": {"data": 3, "shard": 2}}, {"precision": "fp16"}),
    "data x tensor": (text, 6, {"parallel": {"data": 3, "tensor": 2}}, {}),
    "data x pipeline": (text, 6, {"parallel": {"data": 3, "pipeline": 2}}, {"precision": "bf16"}),
    "data x context": (text, 4, {"parallel": {"data": 2, "context": 2}}, {"precision": "fp16"}),
    "data x shard x tensor": (text, 8, {"parallel": {"data": 2, "shard": 2, "tensor": 2}}, {}),
}
SHORT = {"ddp", "fp16", "zero 1", "data x tensor"}


def holder_of(rank: int, more: dict[str, Any]) -> tuple[int, int]:
    """Return a value that is equal on the ranks with the same parts. From the innermost axis, the
    axes are tensor, context, shard, data and pipeline."""
    sizes = more.get("parallel", {"data": 1 << 20})
    inner = sizes.get("tensor", 1) * sizes.get("context", 1) * sizes.get("shard", 1)
    return rank // (inner * sizes["data"]), rank % inner


def tensors(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested state with their paths."""
    if isinstance(state, dict):
        for key, one in state.items():
            yield from tensors(one, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for number, one in enumerate(state):
            yield from tensors(one, f"{path}/{number}")
    else:
        yield path, state


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return the state that the rank updates, keyed by name: parameters, optimizer, loss scale and
    averaged weights."""
    strategy = trainer.strategy
    state = dict(strategy.peer_state_dict())
    state.pop("buffers", None)
    if isinstance(strategy, ModelParallel) and strategy.is_whole:
        own = {id(one) for one in strategy.updated_parameters()}
        named = strategy.model.named_parameters()
        state["parts"] = {name: one.detach() for name, one in named if id(one) in own}
    return {path: one for path, one in tensors(state) if "param_groups" not in path}


def plain(state: dict[str, Any]) -> bytes:
    """Return the bits of a state."""
    found = {
        path: one.detach().contiguous().view(-1).view(torch.uint8).tolist()
        if isinstance(one, Tensor)
        else repr(one)
        for path, one in sorted(state.items())
    }
    return pickle.dumps(found)


KINDS = ["weight", "moment", "average", "scaler", "lr", "rng"]
DAMAGES = ["bit", "nan", "zeros", "sign"]


def corrupt(trainer: Trainer, kind: str, damage: str) -> None:
    """Corrupt a part of this rank's state."""
    state = state_of(trainer)
    if kind == "lr":
        options, calendar = trainer.options, trainer.calendar
        doubled = options.model_copy(
            update={"optimizer": options.optimizer.model_copy(update={"lr": 0.5})}
        )
        num_samples = len(trainer.workload.train)
        trainer._rates = LearningRates(doubled, calendar.total_steps, num_samples)
        return
    if kind == "rng":
        torch.manual_seed(99)
        return
    if kind == "scaler":
        trainer.strategy.update._scaler._scale.mul_(2)  # type: ignore[attr-defined]
        return
    words = {
        "weight": lambda path: path.startswith(("/model", "/parts")),
        "moment": lambda path: "exp_avg" in path or "momentum" in path,
        "average": lambda path: "average/module" in path,
    }
    fitting = words[kind]
    chosen = [
        one
        for path, one in state.items()
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel() > 3 and fitting(path)
    ]
    with torch.no_grad():
        flat = chosen[len(chosen) // 2].detach().view(-1)
        match damage:
            case "bit":
                flat[:1].view(torch.int32).bitwise_xor_(1 << 20)
            case "nan":
                flat[1] = torch.nan
            case "zeros":
                flat.zero_()
            case "sign":
                flat[2].neg_()


def damage_and_store(task: RankTask, kind: str, damage: str, ranks: list[int], step: int) -> None:
    """Corrupt the state of these ranks after a step, and store the state of each rank after each
    step."""
    home = Path(task.spool_dir).parents[2]

    def act(trainer: Trainer) -> None:
        ended = trainer.progress.step + 1
        if ended == step and task.rank in ranks:
            corrupt(trainer, kind, damage)
        (home / f"state-{ended}-{task.rank}").write_bytes(plain(state_of(trainer)))

    arm_with(FaultPoint.STEP_ENDS, act)


def plainly_compared(
    home: Path, num_ranks: int, more: dict[str, Any], every: int = EVERY
) -> tuple[int, list[int]]:
    """Return the first step with differences, or 0, and the ranks that differ from a majority."""
    for step in range(every, NUM_STEPS + 1, every):
        if not (home / f"state-{step}-{num_ranks - 1}").exists():
            break
        states = [(home / f"state-{step}-{rank}").read_bytes() for rank in range(num_ranks)]
        culprits, is_different = [], False
        for holder in {holder_of(rank, more) for rank in range(num_ranks)}:
            ranks = [rank for rank in range(num_ranks) if holder_of(rank, more) == holder]
            counts = Counter(states[rank] for rank in ranks)
            is_different |= len(counts) > 1
            state, count = counts.most_common(1)[0]
            if count * 2 > len(ranks):
                culprits += [rank for rank in ranks if states[rank] != state]
        if is_different:
            return step, sorted(culprits)
    return 0, []


def drawn(name: str, seed: str) -> tuple[str, str, list[int], int]:
    _, num_ranks, _, train = STRATEGIES[name]
    draw = random.Random(f"{name} {seed}")
    kinds = ["weight", "moment", "lr"]
    kinds += ["average"] * ("ema" in train) + ["rng"] * (draw.random() < 0.1)
    kinds += ["scaler"] * (train.get("precision") == "fp16")
    kind = draw.choice(kinds)
    if name == "topk" and kind == "moment":
        kind = "weight"  # topk keeps the momentum in the values that it has not sent
    ranks = draw.sample(range(num_ranks), 2 if draw.random() < 0.15 else 1)
    return kind, draw.choice(DAMAGES), ranks, draw.randint(1, NUM_STEPS)


def run(tmp_path: Path, name: str, kind: str, damage: str, ranks: list[int], step: int) -> None:
    """Run a job with this fault, and compare its report with the plain comparison."""
    make, num_ranks, more, train = STRATEGIES[name]
    spec = {**make(tmp_path, num_ranks, more, **train), "check": {"replicas_every": EVERY}}
    before = functools.partial(damage_and_store, kind=kind, damage=damage, ranks=ranks, step=step)
    codes = run_ranks(tmp_path, spec, world_size=num_ranks, before=before)
    reports = [
        one for rank in range(num_ranks) for one in frames(tmp_path, rank=rank, kind="replicas")
    ]
    differing = [one for one in reports if one["num_differing"]]
    # The replicas are also compared as soon as the loss is not finite.
    is_nan = damage == "nan" and any(one["step"] % EVERY for one in differing)
    found, culprits = plainly_compared(tmp_path, num_ranks, more, 1 if is_nan else EVERY)
    case = (name, kind, damage, ranks, step)
    if kind in ("weight", "moment", "average", "scaler"):
        assert found, case
    if not found:
        assert (codes, differing) == ([0] * num_ranks, []), case
        return
    (report,) = differing
    named = [one["rank"] for one in report["culprits"]]
    assert (report["step"], named) == (found, culprits), case
    assert set(codes) == {1}, case
    causes = {
        one["cause"]
        for rank in range(num_ranks)
        for one in frames(tmp_path, rank=rank, kind="error")
    }
    assert causes == {"corrupted"}, case


@pytest.mark.parametrize("name", soak_but(STRATEGIES, short=SHORT))
def test_what_a_plain_comparison_finds_is_found(name: str, tmp_path: Path) -> None:
    seed = str(random.random()) if FRESH_SEEDS else "0"
    run(tmp_path, name, *drawn(name, seed))


def checked(num_workers: int, every: int = 1000, **train: Any) -> dict[str, Any]:
    """Return a job with few comparisons of its own."""
    spec = document(num_workers, **{"epochs": 1, "max_steps": NUM_STEPS, **train})
    return {**spec, "check": {"replicas_every": every}}


def corrupt_weights(task: RankTask, rank: int, step: int) -> None:
    if task.rank == rank and task.incarnation == 0:
        act = functools.partial(corrupt, kind="weight", damage="bit")
        arm_with(FaultPoint.STEP_ENDS, act, at_step=step)


def make_weights_nan(task: RankTask, ranks: list[int], step: int) -> None:
    if task.rank in ranks:
        act = functools.partial(corrupt, kind="weight", damage="nan")
        arm_with(FaultPoint.STEP_ENDS, act, at_step=step)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ddp", [1]), ("ddp", [0, 1, 2]), soak("fp16", [0]), soak("zero 1", [3])],
)
def test_a_loss_of_nan_is_blamed_on_the_rank_whose_memory_is_corrupted(
    name: str, ranks: list[int], tmp_path: Path
) -> None:
    """Long before the next comparison, and before the optimizer makes all weights NaN. If all
    replicas are equal, the training has diverged."""
    make, num_ranks, more, train = STRATEGIES[name]
    spec = {**make(tmp_path, num_ranks, more, **train), "check": {"replicas_every": 1000}}
    spec["train"] |= {"epochs": 3, "max_steps": 20}
    before = functools.partial(make_weights_nan, ranks=ranks, step=3)
    codes = run_ranks(tmp_path, spec, world_size=num_ranks, before=before)
    assert codes == [1] * num_ranks
    reports = [one for r in range(num_ranks) for one in frames(tmp_path, rank=r, kind="replicas")]
    differing = [one for one in reports if one["num_differing"]]
    errors = [frames(tmp_path, rank=rank, kind="error")[-1] for rank in range(num_ranks)]
    if len(ranks) == num_ranks:
        assert ({one["cause"] for one in errors}, differing) == ({"diverged"}, [])
        return
    (report,) = differing
    assert (report["step"], [one["rank"] for one in report["culprits"]]) == (3, ranks)
    assert {one["cause"] for one in errors} == {"corrupted"}


def test_no_checkpoint_and_no_result_contains_a_difference(tmp_path: Path) -> None:
    spec = {**checked(3), "checkpoint": {"every_steps": 2}}
    before = functools.partial(corrupt_weights, rank=0, step=3)
    assert run_ranks(tmp_path / "saved", spec, world_size=3, before=before) == [1] * 3
    assert [one["step"] for one in frames(tmp_path / "saved", kind="checkpoint")] == [2]
    assert frames(tmp_path / "saved", rank=1, kind="replicas")[-1]["step"] == 4

    early = {"patience": 1, "min_delta": 1e9, "metric": "val/loss"}
    stops = checked(3, epochs=50, max_steps=None, eval_every_epochs=1, early_stopping=early)
    stops["checkpoint"] = {"every_steps": 1000}
    before = functools.partial(corrupt_weights, rank=0, step=16)
    assert run_ranks(tmp_path / "stopped", stops, world_size=3, before=before) == [1] * 3
    assert not (tmp_path / "stopped" / "attempt-1" / "artifacts").exists()
    (report,) = frames(tmp_path / "stopped", rank=1, kind="replicas")
    assert [one["rank"] for one in report["culprits"]] == [0]


def test_a_drill_in_the_step_of_a_checkpoint_is_found_before_the_checkpoint(tmp_path: Path) -> None:
    spec = {**checked(2), "checkpoint": {"every_steps": 2}}
    assert run_ranks(tmp_path, spec, world_size=2, before=drill_at_step_4) == [1, 1]
    assert [one["step"] for one in frames(tmp_path, kind="checkpoint")] == [2]
    assert frames(tmp_path, kind="replicas")[-1]["is_drill"] is True


def drill_at_step_4(task: RankTask) -> None:
    if task.rank == 0:
        arm_with(FaultPoint.STEP_ENDS, lambda trainer: trainer.replica_check._ask(), at_step=4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_difference_is_found_when_a_lost_rank_is_replaced(rank: int, tmp_path: Path) -> None:
    """The replacement gets a copy of rank 0, which is not counted."""
    before = functools.partial(lose_a_rank, rank=rank)
    codes = run_ranks(tmp_path, checked(4), world_size=4, before=before, recovers=True)
    assert codes == [1] * 4
    reports = [one for each in range(4) for one in frames(tmp_path, rank=each, kind="replicas")]
    ((report, named),) = [(one, [c["rank"] for c in one["culprits"]]) for one in reports]
    assert (named, report["num_differing"], report["step"]) == ([rank], 1, 4)
    causes = {frames(tmp_path, rank=each, kind="error")[-1]["cause"] for each in range(4)}
    assert causes == {"corrupted"}


def lose_a_rank(task: RankTask, rank: int) -> None:
    corrupt_weights(task, rank, 3)
    if task.rank == 3 and task.incarnation == 0:
        arm_with(FaultPoint.BEFORE_EXCHANGE, lambda _: die(), at_step=5)


def test_equal_copies_after_a_recovery_are_reported(tmp_path: Path) -> None:
    """So that the service knows the same last comparison as the ranks, which keep only the newest
    checkpoint up to it."""
    before = functools.partial(lose_a_rank, rank=-1)
    codes = run_ranks(tmp_path, checked(4), world_size=4, before=before, recovers=True)
    assert codes == [0] * 4
    reports = frames(tmp_path, kind="replicas")
    assert [(one["step"], one["num_differing"]) for one in reports] == [(4, 0), (NUM_STEPS, 0)]


def test_ranks_with_other_arithmetic_are_not_compared(tmp_path: Path) -> None:
    """The results of rank 2 differ without a fault, because it pretends to have other hardware."""
    before = functools.partial(have_other_hardware, home=tmp_path, ranks=[2])
    assert run_ranks(tmp_path, checked(3, every=2), world_size=3, before=before) == [0] * 3
    assert set(series(tmp_path, "check/replicas_differ").values()) == {0.0}
    assert plainly_compared(tmp_path, 3, {})[1] == [2]

    broken = tmp_path / "broken"
    before = functools.partial(have_other_hardware, home=broken, ranks=[1, 2])
    assert run_ranks(broken, checked(3, every=2), world_size=3, before=before) == [1] * 3
    report = frames(broken, kind="replicas")[-1]
    assert report["num_differing"] == 1
    assert report["culprits"] == []  # two ranks have equal hardware, and no majority


def have_other_hardware(task: RankTask, home: Path, ranks: list[int]) -> None:
    """Let rank 2 have other hardware than the others, and change the weights of these ranks."""
    if task.rank == 2:
        devices.arithmetic = lambda _: ("another GPU",)
    home.mkdir(exist_ok=True)
    damage_and_store(task, "weight", "bit", ranks, 3)


def test_arithmetic_depends_on_the_number_of_threads() -> None:
    """Sums of large tensors are added in another order."""
    values = [torch.randn(300_000 + 1000 * n) for n in range(20)]
    cpu, before, found = torch.device("cpu"), torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append((devices.arithmetic(cpu), [one.sum().item() for one in values]))
    finally:
        torch.set_num_threads(before)
    (one, sums), (other, other_sums) = found
    assert sums != other_sums
    assert one != other


def test_a_replica_has_one_rank_with_each_part() -> None:
    """Compared with loops over the axes, from the outermost to the innermost."""
    for sizes in itertools.product((1, 2), (2, 3), (1, 2), (1, 2), (1, 3)):
        pipeline, _, shard, context, tensor = sizes
        positions = list(itertools.product(*map(range, sizes)))
        shape = MeshShape(pipeline * shard * context * tensor, pipeline)
        for rank, at in enumerate(positions):
            expected = [r for r, other in enumerate(positions) if other[1] == at[1]]
            assert shape.with_same_replica(rank, len(positions)) == expected
