"""One rank's state is corrupted, and the next comparison of the replicas finds what a plain
comparison of all states finds."""

from __future__ import annotations

import functools
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
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.core.schedule import LearningRates
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.model_parallel.model_parallel import ModelParallel
from tests.marks import FRESH_SEEDS, SOAK, soak_but
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import document
from tests.unit.training.ranks import frames, run_ranks

EVERY, NUM_STEPS = 2, 6


def images(folder: Path, num_workers: int, more: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {**document(num_workers, epochs=1, max_steps=NUM_STEPS, **train), **more}


def text(folder: Path, num_workers: int, more: dict[str, Any], **train: Any) -> dict[str, Any]:
    source = work.write_text(folder, num_sentences=250)
    return dict(
        work.document(source, num_workers, more["parallel"], max_steps=NUM_STEPS, **train)
    )


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
    """Corrupt the state of these ranks after a step, and store the state of each rank just before
    each comparison."""
    home = Path(task.spool_dir).parents[2]

    def act(trainer: Trainer) -> None:
        ended = trainer.progress.step + 1
        if ended == step and task.rank in ranks:
            corrupt(trainer, kind, damage)
        if ended % EVERY == 0:
            (home / f"state-{ended}-{task.rank}").write_bytes(plain(state_of(trainer)))

    arm_with(FaultPoint.STEP_ENDS, act)


def plainly_compared(home: Path, num_ranks: int, more: dict[str, Any]) -> tuple[int, list[int]]:
    """Return the first step with differences, or 0, and the ranks that differ from a majority."""
    for step in range(EVERY, NUM_STEPS + 1, EVERY):
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
    make, num_ranks, _, train = STRATEGIES[name]
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
    before = functools.partial(
        damage_and_store, kind=kind, damage=damage, ranks=ranks, step=step
    )
    codes = run_ranks(tmp_path, spec, world_size=num_ranks, before=before)
    reports = [
        one for rank in range(num_ranks) for one in frames(tmp_path, rank=rank, kind="replicas")
    ]
    differing = [one for one in reports if one["num_differing"]]
    found, culprits = plainly_compared(tmp_path, num_ranks, more)
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
        one["cause"] for rank in range(num_ranks) for one in frames(tmp_path, rank=rank, kind="error")
    }
    assert causes == {"corrupted"}, case


@pytest.mark.parametrize("name", soak_but(STRATEGIES, short=SHORT))
def test_what_a_plain_comparison_finds_is_found(name: str, tmp_path: Path) -> None:
    seed = str(random.random()) if FRESH_SEEDS else "0"
    run(tmp_path, name, *drawn(name, seed))
