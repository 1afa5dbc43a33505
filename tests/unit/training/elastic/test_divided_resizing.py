"""A group that divides a model continues with fewer replicas, and later with more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.training.elastic.test_resizing import Resized
from tests.unit.training.parallel.test_model_parallel import EQUAL, brief, furthest
from tests.unit.training.ranks import run_ranks


def test_replicas_of_a_divided_model_leave_and_join(tmp_path: Path) -> None:
    spec: dict[str, Any] = brief(tmp_path, 4, {"shard": 2}, max_steps=16)
    (tmp_path / "a").mkdir()
    assert run_ranks(tmp_path / "a", spec, world_size=4) == [0] * 4
    group = Resized(tmp_path, spec, 4, [(6, 1), (11, 2)])
    try:
        group.gang.start()
        group.until_step(3)
        group.lose(2, 3)
        group.until_step(6)
        for number in (4, 5):
            group.tasks.append(group.gang.add(rank=number, incarnation=1, generation=-1))
        group.gang.next_generation(group.tasks)
        group.gang.wait(recovers=False)
        print([p.exitcode for p in group.gang.processes])
    finally:
        group.gang.kill()
    print(furthest(tmp_path, tmp_path / "a"))
    assert furthest(tmp_path, tmp_path / "a") < EQUAL
