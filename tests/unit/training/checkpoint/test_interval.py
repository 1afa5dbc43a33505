"""The interval between saves depends on the cost of a save and on how often workers are lost."""

from __future__ import annotations

import math
import random
import statistics
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_workers.training.checkpoint.interval import (
    FIRST_SAVE_S,
    MAX_INTERVAL_S,
    MAX_SHARE,
    CheckpointInterval,
    StallMeter,
    interval_s,
    young_interval_s,
)
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.triggers import CheckpointTriggers
from tests.unit.training.ranks import frames

DAY = 24 * 3600.0
NUM_STEPS = 6000


def test_youngs_interval_loses_least() -> None:
    cost, mtbf = 0.5, 3600.0

    def lost(interval: float) -> float:
        """Return the share of time lost to saves, and to half an interval at each failure."""
        return cost / interval + interval / 2 / mtbf

    best = young_interval_s(cost, mtbf)
    assert best == pytest.approx(60.0)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


@pytest.mark.parametrize(
    ("cost", "write", "mtbf", "expected"),
    [
        (0.5, 1.0, 3600.0, 60.0),
        (10.0, 1.0, 365 * DAY, MAX_INTERVAL_S),
        (100.0, 1.0, DAY, 100.0 / MAX_SHARE),
        (1.0, 1.0, 50.0, 1.0 / MAX_SHARE),
        (0.0, 7.0, DAY, 7.0),
        (0.001, 90.0, DAY, 90.0),
    ],
    ids=["Young", "at most", "too dear for that", "fails often", "free", "slow to write"],
)
def test_the_interval_stays_within_its_bounds(
    cost: float, write: float, mtbf: float, expected: float
) -> None:
    assert interval_s(cost, write, mtbf) == pytest.approx(expected)


def test_the_stall_is_what_blocks_and_what_the_steps_take_longer() -> None:
    meter = StallMeter()
    for _ in range(10):
        assert meter.step_took(1.0, is_saving=False) is None
    meter.began(0.25)
    assert meter.step_took(1.5, is_saving=True) is None
    assert meter.step_took(0.875, is_saving=True) is None
    assert meter.step_took(1.25, is_saving=False) == 0.25 + 0.5 - 0.125 + 0.25
    assert meter.step_s == 1.0, "steps during a save do not count as usual"
    meter.began(0.25)
    assert meter.step_took(0.5, is_saving=False) == 0.25, "no save makes steps faster"
    meter.began(0.25)
    assert meter.step_took(2.0, is_saving=True) is None
    assert meter.is_open
    assert meter.ended(4.0) == 0.25 + 1.0 + 4.0
    assert not meter.is_open


def test_before_the_first_usual_step_only_what_blocks_is_known() -> None:
    meter = StallMeter()
    assert math.isnan(meter.step_s)
    meter.began(0.25)
    assert meter.step_took(9.0, is_saving=False) == 0.25


def test_the_first_save_is_early_and_the_next_by_what_it_cost() -> None:
    interval = CheckpointInterval(worker_mtbf_s=3600.0)
    interval.starts_at(40, 1)
    steps = 0
    while not interval.is_due(40 + steps):
        steps += 1
        interval.step_took(0.5)
    assert steps == FIRST_SAVE_S / 0.5
    interval.saved_at(60)
    interval.step_took(FIRST_SAVE_S)
    assert not interval.is_due(80), "the cost of a save is not known yet"
    assert interval.measured(0.5, 1.0, step_s=0.5) == 120
    assert not interval.is_due(60 + 119)
    assert interval.is_due(60 + 120)


def test_one_outlier_does_not_change_the_interval() -> None:
    interval = CheckpointInterval(worker_mtbf_s=3600.0)
    for cost in (0.5, 0.5, 90.0):
        assert interval.measured(cost, 1.0, step_s=0.5) == 120


def test_steps_that_become_slower_are_not_waited_for() -> None:
    interval = CheckpointInterval(worker_mtbf_s=3600.0)
    interval.starts_at(0, 1)
    interval.measured(0.5, 1.0, step_s=0.5)
    interval.step_took(MAX_INTERVAL_S)
    assert interval.is_due(1)


def test_the_interval_follows_the_size_of_the_group() -> None:
    interval = CheckpointInterval(worker_mtbf_s=3600.0)
    interval.starts_at(0, 1)
    assert interval.measured(0.5, 1.0, step_s=0.5) == 120
    interval.starts_at(40, 4)
    assert interval.every_steps == 60, "four workers fail four times as often"
    assert interval.measured(0.5, 1.0, step_s=0.5) == 60


def test_an_interval_has_a_step_at_least() -> None:
    assert CheckpointInterval(worker_mtbf_s=3600.0).measured(0.0, 0.0, step_s=100.0) == 1


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "attempt-1" / "spool" / "r0.0.metrics"))
    return lambda: {m["step"]: m["values"] for m in frames(tmp_path, kind="metrics")}


def test_each_save_is_told_with_its_stall_once(tmp_path: Path, told: Any) -> None:
    manager = CheckpointManager((tmp_path / "c").as_uri(), keep=9, best=None)
    saves = CheckpointTriggers(manager, None)
    state = {"w": torch.ones(3)}
    for step in range(1, 5):
        saves.step_took(step, 1.0)
        assert not saves.is_due(step)
        if step >= 2:
            saves.save(CheckpointMetadata(step, {}, {}), state)
    manager.wait()
    saves.step_took(5, 1.0)
    assert sum("perf/checkpoint_stall_s" in values for values in told().values()) == 3
    assert all(list(values) == ["perf/checkpoint_stall_s"] for values in told().values())
    assert len(told()) == len(frames(tmp_path, kind="metrics")), (
        "a key was reported twice for a step"
    )


def test_the_interval_is_told_and_logged(
    tmp_path: Path, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = CheckpointManager((tmp_path / "c").as_uri(), keep=9, best=None)
    interval = CheckpointInterval(worker_mtbf_s=DAY)
    saves = CheckpointTriggers(manager, interval)
    saves.starts_at(0, 1)
    saves.step_took(1, FIRST_SAVE_S)
    assert saves.is_due(1)
    saves.save(CheckpointMetadata(1, {}, {}), {"w": torch.ones(3)})
    manager.wait()
    assert not saves.is_due(1)
    saves.step_took(2, FIRST_SAVE_S)
    values = told()[2]
    assert values["perf/checkpoint_every_steps"] == interval.every_steps
    assert values["perf/checkpoint_stall_s"] > 0.0
    assert f"a checkpoint every {interval.every_steps} steps" in capsys.readouterr().out


class DrawnSaves:
    """A manager whose saves take a drawn number of steps, in place of `CheckpointManager`."""

    def __init__(self, rank: int, num_ranks: int, chance: random.Random) -> None:
        self.group: Any = SimpleNamespace(rank=rank, world_size=num_ranks)
        self.commits = rank == 0
        self.steps_left, self.write_s, self._chance = 0, 0.0, chance
        self.saved: list[int] = []

    @property
    def is_saving(self) -> bool:
        return self.steps_left > 0

    def save(self, about: CheckpointMetadata, state: Any, *, volatile: Any) -> None:
        self.saved.append(about.step)
        self.steps_left, self.write_s = self._chance.randrange(1, 9), self._chance.uniform(1, 60)

    def has(self, step: int) -> bool:
        return False

    def wait_for(self, step: int) -> None:
        self.steps_left = 0

    wait = hold = lambda self: None


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_a_divided_model_agree_on_the_interval_of_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    num_ranks, step_s, mtbf_s = chance.randrange(2, 5), chance.choice([0.05, 0.4, 3.0]), 2e3
    meeting = threading.Barrier(num_ranks, timeout=30.0)
    table: list[Any] = [None] * num_ranks
    interval_of = [CheckpointInterval(mtbf_s) for _ in range(num_ranks)]
    chosen: list[tuple[float, float, float, int]] = []
    measured = interval_of[0].measured

    def note(*costs: float) -> int:
        chosen.append((*costs, measured(*costs)))
        return chosen[-1][-1]

    monkeypatch.setattr(interval_of[0], "measured", note)
    managers: list[Any] = [
        DrawnSaves(rank, num_ranks, random.Random(f"{seed} {rank}")) for rank in range(num_ranks)
    ]
    stalls: list[list[float]] = [[] for _ in range(num_ranks)]
    num_exchanges = [0] * num_ranks

    def maxima(values: list[float], device: Any, world_size: int) -> list[float]:
        rank = int(threading.current_thread().name)
        num_exchanges[rank] += 1
        table[rank] = list(map(float, values))
        meeting.wait()
        found = [max(column) for column in zip(*table, strict=True)]
        meeting.wait()
        return found

    monkeypatch.setattr("ray_workers.training.checkpoint.triggers.process_group.maxima", maxima)

    def run(rank: int) -> None:
        own = random.Random(f"{rank} {seed}")
        triggers = CheckpointTriggers(managers[rank], interval_of[rank])
        triggers.starts_at(0, num_ranks)
        for step in range(1, NUM_STEPS + 1):
            slower_s = 0.0
            if managers[rank].is_saving:
                slower_s = own.choice([0.0, 0.5, 4.0])
                stalls[rank][-1] += slower_s
                managers[rank].steps_left -= 1
            triggers.step_took(step, step_s + slower_s)
            if triggers.is_due(step):
                stalls[rank].append(0.0)
                triggers.save(CheckpointMetadata(step, {}, {}), {})

    ranks = [
        threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(num_ranks)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert not meeting.broken
    assert managers[0].saved == managers[-1].saved != []
    assert len(chosen) >= 2
    costs: list[float] = []
    for stall_s, write_s, usual_s, every in chosen:
        slowest = max(one[len(costs)] for one in stalls)
        assert stall_s == pytest.approx(slowest, abs=0.1), "besides the call of `save` itself"
        assert usual_s == pytest.approx(step_s)
        costs.append(stall_s)
        wanted = interval_s(statistics.median(costs[-5:]), write_s, mtbf_s / num_ranks)
        assert every == max(1, round(wanted / step_s))
    assert len(set(num_exchanges)) == 1
    in_a_second = max(1, int(1.0 / step_s))
    assert num_exchanges[0] <= NUM_STEPS // in_a_second + 4 * len(managers[0].saved) + 4
