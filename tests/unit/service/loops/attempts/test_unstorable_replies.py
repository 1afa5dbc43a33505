"""An attempt ends and releases its slots, regardless of what its ranks report or damage."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import Frame
from ray_workers.shared.names import attempt_prefix
from service.domain.series import Points
from service.ingest.attempt_results import LEFT_OUT
from service.ingest.rank_frames import RankFrames
from service.runtime import Runtime
from service.telemetry import refused_logs
from tests.fakes.attempt import FakeRank
from tests.unit.service.loops.world import (
    World,
    causes,
    comes_to,
    eventually,
    keeps_its_promises,
    log_of,
    steps_of,
)


async def says(runtime: Runtime, job_id: str, type_: str) -> None:
    async def said() -> bool:
        events = (await runtime.queries.events(job_id)).items
        return any(event.type == type_ for event in events)

    await eventually(said, f"{job_id} has no event {type_}")


async def test_a_job_that_spoilt_its_log_folder_is_cancelled_and_its_slots_go_to_others(
    world: World, tmp_path: Path
) -> None:
    async def spoils(rank: FakeRank) -> None:
        logs = tmp_path / "storage" / attempt_prefix(rank.job_id, rank.attempt) / "logs"
        logs.parent.mkdir(parents=True, exist_ok=True)
        logs.touch()
        for number in range(8):
            rank.print(f"{number} " + "x" * 30_000)
        await asyncio.get_running_loop().create_future()

    world.plays["spoils"] = spoils
    runtime = await world.open()
    job_id = await world.submit(runtime, "spoils", workers=4)
    await says(runtime, job_id, refused_logs.REFUSED)
    other = await world.submit(runtime, "trains", workers=4)
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    page = await runtime.queries.logs(job_id, rank=0)
    assert [line.text[0] for line in page.items] == [str(number) for number in range(8)]
    await keeps_its_promises(world, runtime, job_id)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing the metric `train/poison` makes the transaction fail."""
    take = RankFrames.take

    def taken(self: RankFrames, frames: Sequence[Frame]) -> Mapping[tuple[str, int], Points]:
        stored = take(self, frames)
        if any("train/poison" in frame.body.get("values", {}) for frame in frames):
            raise OverflowError("a number that no column takes")
        return stored

    monkeypatch.setattr(RankFrames, "take", taken)


@pytest.mark.usefixtures("poisoned")
async def test_reports_that_can_not_be_stored_do_not_keep_a_job_from_being_cancelled(
    world: World,
) -> None:
    async def poisons(rank: FakeRank) -> None:
        rank.report(1, train_poison=1.0)
        await asyncio.get_running_loop().create_future()

    world.plays["poisons"] = poisons
    runtime = await world.open()
    job_id, other = await world.submit(runtime, "poisons"), await world.submit(runtime, "trains")
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    await keeps_its_promises(world, runtime, job_id)


@pytest.mark.usefixtures("poisoned")
async def test_no_job_succeeds_without_the_reports_that_were_left_out(world: World) -> None:
    async def poisons_once(rank: FakeRank) -> None:
        rank.print("hello")
        rank.report(1, train_loss=1.0)
        if rank.attempt == 1:
            rank.report(2, train_poison=1.0)

    world.plays["poisons_once"] = poisons_once
    runtime = await world.open()
    job_id = await world.submit(runtime, "poisons_once")
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["infrastructure", "succeeded"]
    await says(runtime, job_id, LEFT_OUT)
    assert await steps_of(runtime, job_id) == [1]
    assert await log_of(runtime, job_id, attempt=2) == ["hello"]
    await keeps_its_promises(world, runtime, job_id)
