"""Jobs that share GPUs, while the loops run."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from service.domain.errors import Unsatisfiable
from service.runtime import Runtime
from tests.unit.service.loops.world import World, comes_to, eventually, says

HALF = {"gpus_per_worker": 0.5, "share_gpus": True}


async def submit(runtime: Runtime, play: str, workers: int, **resources: Any) -> str:
    document = {
        "name": play,
        "recipe": "image_classification",
        "resources": {"num_workers": workers, **resources},
    }
    job, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    return job.id


async def test_two_jobs_share_gpus_and_one_for_a_whole_gpu_waits(world: World) -> None:
    world.fake.nodes["node-a"].resources |= {"CPU": 8.0, "GPU": 2.0}
    runtime = await world.open()
    first, second = [await submit(runtime, "waits", 2, **HALF) for _ in range(2)]
    for job_id in (first, second):
        await comes_to(runtime, job_id, JobState.RUNNING)
    with pytest.raises(Unsatisfiable, match="room for 2 at once, each on a different GPU"):
        await submit(runtime, "trains", 3, **HALF)
    whole = await submit(runtime, "trains", 1, gpus_per_worker=1)
    await says(runtime, whole, "waiting_for_slots")
    await runtime.jobs.cancel(first)
    await comes_to(runtime, first, JobState.CANCELLED)

    async def waits_for_second() -> bool:
        told = (await runtime.queries.explain(whole)).reason
        return told.message.endswith(
            f"; 0 are free, and job {second} holds 2 slots on suitable nodes"
        )

    await eventually(waits_for_second, "a part of each GPU is taken")
    await runtime.jobs.cancel(second)
    await comes_to(runtime, whole, JobState.SUCCEEDED)
