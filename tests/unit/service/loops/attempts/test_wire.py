"""Training receives the measurements of the cluster that it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.recipes import RECIPES
from ray_workers.shared.contracts import WORKER_MTBF_S, Cause, RankTask
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.supervision.member import Member
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import Slots
from ray_workers.supervision.worker_group import WorkerGroup
from ray_workers.training.checkpoint import triggers
from ray_workers.training.checkpoint.interval import CheckpointInterval
from ray_workers.training.loop import trainer
from tests.fakes.attempt import Failed, FakeRank
from tests.unit.service.loops.world import World, comes_to


async def test_observed_failures_determine_the_checkpoint_interval(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def is_lost_once(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        if rank.spec.attempt == 1:
            raise Failed(Cause.WORKER_LOST, "the worker of rank 0 vanished")

    world.plays["is_lost_once"] = is_lost_once
    runtime = await world.open()
    job_id = await world.submit(
        runtime, "is_lost_once", workers=2, checkpoint={"every_steps": "auto"}
    )
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    first, second = [await world.fake.launched(job_id, attempt) for attempt in (1, 2)]
    assert first.worker_mtbf_s == WORKER_MTBF_S
    assert second.worker_mtbf_s < 0.6 * WORKER_MTBF_S

    group = WorkerGroup(second, "node-a", "127.0.0.1", MachineSpeed(), Timings())
    slots = Slots(second.slices[0], cast(Any, None), {})
    sent = group._task(Member(1, 1, 1, 0, slots, bundle=1, local_world_size=2, actor=None))
    task = RankTask.from_json(sent.to_json())
    intervals: list[float] = []
    monkeypatch.setattr(
        triggers,
        "CheckpointInterval",
        lambda mtbf_s: intervals.append(mtbf_s) or CheckpointInterval(mtbf_s),
    )
    spec = JobSpec.model_validate(task.spec)
    workload = RECIPES["image_classification"].build(spec, task.data_policy)
    trainer.Trainer(task, spec, workload, HeartbeatPage(None))
    assert intervals == [second.worker_mtbf_s]
