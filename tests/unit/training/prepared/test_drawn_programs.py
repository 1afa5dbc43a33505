"""Programs that nobody chose: several models, optimizers and passes a batch, with ranks that die.

Undisturbed, a program trains as one that averages its gradients by hand. Killed at any point, it
ends with the same bits, or its ranks end with `worker_lost`, so that the job goes on from its
checkpoint, and then ends with the same bits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.marks import SOAK
from tests.unit.training.prepared.drawn_programs import (
    GLOBAL_BATCH,
    NUM_BATCHES,
    SAMPLES,
    DrawnProgram,
    draw,
)
from tests.unit.training.prepared.programs import assert_same, final_state
from tests.unit.training.ranks import checkpoint_refs, frames, run_in_group, run_ranks

SHORT = (3, 11)
SEEDS = [pytest.param(seed, marks=() if seed in SHORT else SOAK) for seed in range(60)]


def run(
    home: Path,
    program: DrawnProgram,
    world_size: int,
    kills: Sequence[Sequence[int]] = (),
    every: int | None = None,
    **how: Any,
) -> list[int | None]:
    home.mkdir(parents=True, exist_ok=True)
    path = home / "drawn.py"
    path.write_text(program.text(home, [list(kill) for kill in kills], every=every))
    spec = {"script": {"entrypoint": str(path)}}
    return run_ranks(home, spec, world_size=world_size, recovers=True, **how)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_program_that_is_killed_ends_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    program = draw(seed)
    dice = random.Random(f"kills {seed}")
    world_size = dice.choice((2, 2, 3))
    assert run(tmp_path / "undisturbed", program, world_size) == [0] * world_size
    undisturbed = final_state(tmp_path / "undisturbed", world_size)
    if not program.draws_noise:
        compare_with_plain_torch(tmp_path, program, world_size, undisturbed)
    for number in range(2):
        first, second = dice.sample(range(world_size), 2)
        kills = [[first, 0, dice.randrange(NUM_BATCHES), dice.randrange(program.num_points)]]
        if number:
            kills.append(
                [second, 0, dice.randrange(NUM_BATCHES), dice.randrange(program.num_points)]
            )
        home = tmp_path / f"killed-{number}"
        every = dice.choice((None, 2))
        codes = run(home, program, world_size, kills, every)
        if codes != [0] * world_size:
            assert_went_back(home, world_size)
            refs = checkpoint_refs(home)
            codes = run(home, program, world_size, kills, every, attempt=2, resume_from=refs)
            assert codes == [0] * world_size
        assert_same(final_state(home, world_size), undisturbed)


def assert_went_back(home: Path, world_size: int) -> None:
    """Each rank that ended with an error has blamed it on the loss of a peer."""
    errors = [
        error for rank in range(world_size) for error in frames(home, rank=rank, kind="error")
    ]
    assert errors
    assert {error["cause"] for error in errors} == {"worker_lost"}, errors
    assert any("checkpoint" in error["message"] for error in errors), errors


def compare_with_plain_torch(
    home: Path, program: DrawnProgram, world_size: int, state: list[Any]
) -> None:
    folder = home / "plain"
    folder.mkdir()
    run_in_group(plainly, world_size, program.seed, str(folder), world_size)
    plain = torch.load(folder / "state-0.pt")
    close(state, plain)


def close(one: Any, other: Any) -> None:
    """Equal up to rounding in fp64, of which RMSprop and AdamW make steps where the gradient is
    zero but for it, as before a BatchNorm. Buffers, which a rank updates by itself, are left
    out."""
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if not str(key).endswith(("running_mean", "running_var")):
                close(one[key], other[key])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            close(a, b)
    elif isinstance(one, float):
        assert one == pytest.approx(other)


def plainly(rank: int, seed: int, folder: str, world_size: int) -> None:
    os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank), "0"
    train = PlainTrain(rank, world_size)
    text = draw(seed).text(Path(folder), [], imports="")
    exec(compile(text, "drawn.py", "exec"), {"train": train, "BACKWARD": train.backward})


class PlainTrain:
    """`dray.train` for one pass of a program, by plain torch: each backward pass averages its new
    gradients by hand, weighted by the samples of each rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._models: list[nn.Module] = []
        self._weight = 1.0 / world_size
        self._epoch, self._batch = -1, 0

    def init(self, **_: Any) -> None:
        pass

    def prepare(self, models: Any, _: Any, loader: Any = None, **__: Any) -> tuple[Any, Any, Any]:
        self._models += models if isinstance(models, list) else [models]
        return models, _, self._shares(loader) if loader is not None else None

    def _shares(self, loader: Any) -> Any:
        return _Shares(self, loader.dataset)

    def shares(self, dataset: Any) -> Iterator[tuple[Tensor, Tensor]]:
        self._epoch += 1
        for self._batch, start in enumerate(range(0, SAMPLES, GLOBAL_BATCH)):
            whole = list(range(start, min(start + GLOBAL_BATCH, SAMPLES)))
            first = len(whole) * self._rank // self._world_size
            last = len(whole) * (self._rank + 1) // self._world_size
            self._weight = (last - first) / len(whole)
            yield dataset[whole[first:last]]

    def progress(self) -> Any:
        return SimpleNamespace(epoch=self._epoch, batch=self._batch)

    def backward(self, loss: Tensor) -> None:
        trained = [p for model in self._models for p in model.parameters() if p.requires_grad]
        new = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, new, strict=True):
            if gradient is None:
                continue
            gradient = gradient * self._weight
            dist.all_reduce(gradient)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _Shares:
    def __init__(self, train: PlainTrain, dataset: Any) -> None:
        self._train, self._dataset = train, dataset

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._train.shares(self._dataset)
