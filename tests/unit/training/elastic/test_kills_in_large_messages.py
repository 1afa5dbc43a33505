"""A rank is killed at a random moment of the steps of a model whose messages have many MB: the job
ends, with the weights of an uninterrupted job if the ranks' copies are equal.

Gloo wakes the other ranks from some operations and not from others, depending on the moment.
"""

from __future__ import annotations

import functools
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.marks import FRESH_SEEDS, SOAK
from tests.unit.training.elastic.test_recovery import die
from tests.unit.training.jobs import assert_same, document, weights
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import replaced, run_ranks

STEP_S = 0.5
"""About the duration of a step: the kill is at a random moment of it, or of the next one."""
COPIES = {"checkpoint": {"in_memory": {"every_steps": 2}}}
TEXT = {"width": 512, "num_layers": 2, "num_heads": 4, "context_length": 32}
MLP = {"name": "mlp", "width": 2048, "num_layers": 2}
SEEDS = [random.randrange(2**32) for _ in range(3)] if FRESH_SEEDS else [1, 2, 3]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {}),
    "3 replicas": (3, {}),
    "gossip": (3, {"sync": {"kind": "gossip"}}),
    "shards": (2, {"parallel": {"shard": 2}} | COPIES),
    "3 shards": (3, {"parallel": {"shard": 3}} | COPIES),
    "ZeRO 1": (2, {"parallel": {"shard": 2, "zero": 1}} | COPIES),
    "tensor": (2, {"parallel": {"tensor": 2}} | COPIES),
    "pipeline": (2, {"parallel": {"pipeline": 2}} | COPIES),
    "context": (2, {"parallel": {"context": 2}} | COPIES),
    "data x shard": (4, {"parallel": {"data": 2, "shard": 2}}),
}
OF_TEXT = ("tensor", "pipeline", "context")


def _kill(task: RankTask, rank: int, step: int, after_s: float) -> None:
    if task.rank == rank and task.incarnation == 0:
        timer = threading.Timer(after_s, die)
        timer.daemon = True
        arm(FaultPoint.STEP_BEGINS, timer.start, at_step=step)


@SOAK
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_is_lost(kind: str, seed: int, tmp_path: Path) -> None:
    num_ranks, options = KINDS[kind]
    if kind in OF_TEXT:
        spec = brief(tmp_path, num_ranks, options["parallel"]) | COPIES
        spec["model"] = spec["model"] | TEXT
    else:
        spec = document(num_ranks, max_steps=8, global_batch_size=24) | {"model": MLP} | options
    alone, home = tmp_path / "alone", tmp_path / "home"
    for folder in (alone, home):
        folder.mkdir()
    assert run_ranks(alone, spec, world_size=num_ranks) == [0] * num_ranks
    draw = random.Random(f"{kind} {seed}")
    rank = draw.randrange(num_ranks)
    moment = {"step": draw.randint(2, 5), "after_s": draw.uniform(0, STEP_S)}
    before = functools.partial(_kill, rank=rank, **moment)
    codes = run_ranks(home, spec, world_size=num_ranks, before=before, recovers=True)
    assert (codes, replaced(home)) == ([0] * num_ranks, [rank])
    if kind != "gossip":  # the replacement gets the copy of another rank
        assert_same(weights(home), weights(alone))
