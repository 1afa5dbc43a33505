"""The group of a prepared script continues with fewer ranks, and later with more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_workers.training.core.faultpoints import FaultPoint
from tests.marks import ONE_SET, SOAK
from tests.unit.training.elastic.test_resizing import Resized
from tests.unit.training.prepared.programs import Leash, final_state, program, run

PLAIN = {
    "MIDDLE": "[nn.Tanh()]",
    "NUMBERS": """lambda step, numbers: print(
    json.dumps([step, numbers.tolist()]), file=LOG, flush=True
)""",
    "LOG": 'open(f"{OUT}/numbers-{os.getpid()}", "w")',
}


def elastic(home: Path, num_workers: int) -> dict[str, Any]:
    document = program(home, **PLAIN)
    document["elastic"] = {"min_workers": 1}
    document["resources"] = {"num_workers": num_workers}
    return document


def batches(home: Path) -> dict[int, list[int]]:
    """Return the sorted samples of each step; if a process ran a step twice, from the second
    time."""
    found: dict[int, list[int]] = {}
    for path in home.glob("numbers-*"):
        own = {}
        for line in path.read_text().splitlines():
            step, numbers = json.loads(line)
            own[step] = numbers
        for step, numbers in own.items():
            found[step] = sorted(found.get(step, []) + numbers)
    return dict(sorted(found.items()))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    run(home, 3, **PLAIN)
    return home


def assert_learnt_the_same(home: Path, other: Path, world_size: int) -> None:
    found, expected = final_state(home, world_size)[0], final_state(other, 3)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@SOAK
def test_a_lost_node_is_done_without(tmp_path: Path, undisturbed: Path) -> None:
    leash = Leash(FaultPoint.BEFORE_EXCHANGE, 7)
    job = Resized(tmp_path, elastic(tmp_path, 3), 3, [], leash)
    try:
        job.gang.start()
        job.until_step(6)
        job.lose(2)
        job.gang.processes[0].join()
        job.gang.processes[1].join()
        assert [process.exitcode for process in job.gang.processes] == [0, 0, -9]
    finally:
        job.gang.kill()
    assert_learnt_the_same(tmp_path, undisturbed, 2)
    seen = batches(tmp_path)
    expected = batches(undisturbed)
    lost = seen.pop(7), expected.pop(7)
    assert set(lost[0]) == set(lost[1])  # the lost rank had also begun it
    assert seen == expected


@ONE_SET
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_grows_between_two_batches(
    tmp_path: Path, undisturbed: Path, world_size: int
) -> None:
    leash = Leash(FaultPoint.STEP_ENDS, 4)
    job = Resized(tmp_path, elastic(tmp_path, world_size + 1), world_size, [], leash)
    try:
        job.gang.start()
        job.until_step(4)
        job.gain()
        for process in job.gang.processes:
            process.join()
        assert [process.exitcode for process in job.gang.processes] == [0] * (world_size + 1)
    finally:
        job.gang.kill()
    assert_learnt_the_same(tmp_path, undisturbed, world_size + 1)
    assert batches(tmp_path) == batches(undisturbed)
