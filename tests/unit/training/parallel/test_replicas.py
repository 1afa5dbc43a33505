"""Replicas of the model are compared during training, and a flipped bit ends the attempt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dray.spec import JobSpec
from dray.train.prepared.copies import checksum
from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm_with
from ray_workers.training.loop.replica_check import ReplicaCheck
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.replicas import ReplicaComparison, flip_bit, judge
from tests.unit.spec.job_documents import check_refusal
from tests.unit.training.jobs import document, series
from tests.unit.training.ranks import frames, run_ranks

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int64, torch.int8, torch.bool, torch.complex64),
)


def drawn(draw: random.Random, dtype: torch.dtype) -> Tensor:
    """Return a tensor with a random shape, which is sometimes not contiguous or not aligned."""
    shape = [draw.randint(1, 9) for _ in range(draw.randint(0, 3))]
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    flat = (torch.randn(count + 1) * 50).to(dtype)[1:]
    whole = flat.reshape(shape)
    return whole.transpose(0, -1) if len(shape) > 1 and draw.random() < 0.5 else whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_single_flipped_bit_changes_both_sums(dtype: torch.dtype) -> None:
    draw = random.Random(f"bits of {dtype}")
    torch.manual_seed(7)
    for _ in range(60):
        state = [torch.empty(0), drawn(draw, dtype), torch.ones(3, dtype=torch.float64)]
        before = checksum(state)
        assert checksum([one.clone() for one in state]) == before
        damaged = state[1].contiguous().clone().reshape(-1)
        raw = damaged.view(torch.uint8)
        at = draw.randrange(len(raw))
        raw[at] ^= 1 if dtype is torch.bool else 1 << draw.randrange(8)
        after = checksum([state[0], damaged.reshape(state[1].shape), state[2]])
        assert all(one != other for one, other in zip(before, after, strict=True))


def test_each_bit_of_a_large_tensor_counts() -> None:
    """The tensor has several rows and chunks, and an incomplete last row."""
    draw = random.Random("large")
    large = torch.zeros((1 << 23) + 12_345, dtype=torch.float32)
    before = checksum([large])
    for at in (0, 1 << 14, (1 << 23) - 1, 1 << 23, len(large) - 1):
        word = large.view(torch.int32)
        bit = draw.randrange(31)
        word[at] ^= 1 << bit
        assert all(a != b for a, b in zip(before, checksum([large]), strict=True))
        word[at] ^= 1 << bit
    assert checksum([large]) == before


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one is not torch.bool], ids=str)
def test_a_drill_flips_exactly_one_bit(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    before = tensor.clone()
    flip_bit(tensor)
    raw, old = tensor.view(torch.uint8).tolist(), before.view(torch.uint8).tolist()
    assert sum((a ^ b).bit_count() for a, b in zip(raw, old, strict=True)) == 1


def test_a_majority_names_the_culprits() -> None:
    """Compared with a loop over all pairs of ranks: a rank is wrong if fewer than half of the ranks
    with its part agree with it, and more than half agree with each other."""
    draw = random.Random("majorities")
    for _ in range(300):
        num_ranks = draw.randint(2, 9)
        holders = [draw.randrange(2) for _ in range(num_ranks)]
        sums = [(draw.choice([5, 5, 5, 6, 7]), 1) for _ in range(num_ranks)]
        found = judge([sums], [holders])
        expected = []
        for rank in range(num_ranks):
            peers = [r for r in range(num_ranks) if holders[r] == holders[rank]]
            agreeing = max(sum(sums[a] == sums[b] for b in peers) for a in peers)
            usual = [a for a in peers if sum(sums[a] == sums[b] for b in peers) * 2 > len(peers)]
            if usual and agreeing * 2 > len(peers) and rank not in usual:
                expected.append(rank)
        assert list(found.culprits) == expected
        same = all(
            sums[a] == sums[b]
            for a in range(num_ranks)
            for b in range(num_ranks)
            if holders[a] == holders[b]
        )
        assert (found.num_differing == 0) == same


EVERY = 5
STRATEGIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ddp": (2, {}, {}),
    "ema": (2, {}, {"ema": {"decay": 0.9}}),
    "exact": (2, {"elastic": {"min_workers": 1, "exact": True}}, {}),
    "balanced": (2, {"parallel": {"balance": "auto"}}, {}),
    "topk": (2, {"sync": {"compression": {"name": "topk"}}}, {"optimizer": {"name": "sgd"}}),
    "powersgd": (2, {"sync": {"compression": {"name": "powersgd"}}}, {}),
    "hsdp": (4, {"parallel": {"data": 2, "shard": 2}}, {}),
    "zero1": (4, {"parallel": {"data": 2, "shard": 2, "zero": 1}}, {}),
}


def job(name: str) -> tuple[int, dict[str, Any]]:
    num_workers, more, train = STRATEGIES[name]
    return num_workers, {
        **document(num_workers, epochs=1, **train),
        "check": {"replicas_every": EVERY},
        **more,
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_are_equal_without_a_fault(name: str, tmp_path: Path) -> None:
    num_workers, spec = job(name)
    assert run_ranks(tmp_path, spec, world_size=num_workers) == [0] * num_workers
    found = series(tmp_path, "check/replicas_differ")
    assert found
    assert set(found.values()) == {0.0}
    assert [one["step"] for one in frames(tmp_path, kind="replicas")] == sorted(found)


class Flips:
    """Flips a bit of one rank's state after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def __call__(self, task: RankTask) -> None:
        if task.rank == self.rank:
            arm_with(FaultPoint.STEP_ENDS, _flip, at_step=self.step)


def _flip(trainer: Trainer) -> None:
    trainer.strategy.flip_bit()


@pytest.mark.parametrize(("num_workers", "culprits"), [(2, []), (3, [1])])
def test_a_flipped_bit_ends_the_attempt_at_the_next_comparison(
    num_workers: int, culprits: list[int], tmp_path: Path
) -> None:
    spec = {**document(num_workers, epochs=1), "check": {"replicas_every": 2}}
    codes = run_ranks(tmp_path, spec, world_size=num_workers, before=Flips(1, 3))
    assert codes == [1] * num_workers
    agreed, differing = frames(tmp_path, kind="replicas")
    assert (agreed["step"], agreed["num_differing"]) == (2, 0)
    assert (differing["step"], differing["num_differing"]) == (4, 1)
    assert [one["rank"] for one in differing["culprits"]] == culprits
    errors = [frames(tmp_path, rank=rank, kind="error")[0] for rank in range(num_workers)]
    assert {one["cause"] for one in errors} == {"corrupted"}
    named = [r for r, one in enumerate(errors) if one["type"] == "CorruptedReplicaError"]
    assert named == culprits


@pytest.mark.parametrize("name", ["hsdp", "zero1"])
def test_a_flipped_bit_of_a_divided_model_is_found(name: str, tmp_path: Path) -> None:
    num_workers, spec = job(name)
    codes = run_ranks(tmp_path, spec, world_size=num_workers, before=Flips(1, 3))
    assert codes == [1] * num_workers
    assert frames(tmp_path, kind="replicas")[-1]["num_differing"] > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"resources": {"num_workers": 1}}, "requires at least two replicas"),
    ({"parallel": {"shard": 4}}, "set parallel.data to 2 or more"),
    ({"parallel": "auto"}, "requires numbers as the sizes of the axes"),
    ({"sync": {"every": 4}}, "requires sync.every 1"),
    ({"sync": "auto"}, "might choose copies that differ"),
    ({"sync": {"kind": "gossip"}}, "has no copies of the model that are equal"),
    ({"sync": {"kind": "parameter_server"}}, "has no copies of the model that are equal"),
    ({"federated": {"clients": 4, "clients_per_round": 4, "rounds": 2}}, "can't be combined with"),
    (
        {
            "recipe": None,
            "script": {"entrypoint": "a.py"},
            "parallel": {"shard": 2},
        },
        "is not supported for scripts that divide a model",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_jobs_without_equal_replicas_are_refused(fields: dict[str, Any], message: str) -> None:
    given = {"recipe": "image_classification", "resources": {"num_workers": 4}, **fields}
    given = {name: value for name, value in given.items() if value is not None}
    JobSpec.model_validate(given)
    check_refusal({**given, "check": {"replicas_every": 10}}, "/check/replicas_every", message)


@pytest.mark.parametrize("num_compared", [0, 2])
def test_replicas_agree_only_if_they_were_compared(num_compared: int) -> None:
    """An elastic group of two replicas can shrink to one, which is compared with no other."""
    agreed: list[int] = []
    check = ReplicaCheck(1, torch.device("cpu"), agreed.append)
    strategy = Mock(world_size=2, rank=1)
    strategy.compare_copies.return_value = ReplicaComparison(0, (), num_compared)
    strategy.hardware.return_value = ("same", "same")
    check.after_step(1, strategy, is_saved=False)
    assert agreed == ([1] if num_compared else [])
