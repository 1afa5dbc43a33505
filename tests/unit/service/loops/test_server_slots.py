"""Jobs whose parameter servers have resources of their own, while the loops run."""

from __future__ import annotations

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from service.runtime import Runtime
from tests.unit.service.loops.world import World, comes_to, eventually, says

pytestmark = pytest.mark.anyio


async def submit(runtime: Runtime, play: str) -> str:
    """Two workers on GPUs, and a server of 3 CPUs."""
    document = {
        "name": play,
        "recipe": "image_classification",
        "resources": {"num_workers": 3, "gpus_per_worker": 1},
        "sync": {"kind": "parameter_server", "server_resources": {"cpus": 3}},
    }
    job, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    return job.id


async def test_a_gang_with_servers_holds_what_it_asked_for_and_gives_it_back(world: World) -> None:
    node = world.fake.nodes["node-a"]
    node.resources |= {"CPU": 8.0, "GPU": 4.0}
    runtime = await world.open()
    first = await submit(runtime, "waits")
    await comes_to(runtime, first, JobState.RUNNING)
    assert node.held == {"CPU": 5.0, "GPU": 2.0}
    second = await submit(runtime, "trains")
    explained = await says(runtime, second, "waiting_for_slots")
    asked = "needs 2 workers of 1 CPU and 1 GPU, and 1 server of 3 CPU"
    assert explained.reason.message.startswith(asked)
    await runtime.jobs.cancel(first)
    await comes_to(runtime, second, JobState.SUCCEEDED)

    async def is_free() -> bool:
        return not any(node.held.values())

    await eventually(is_free, "all slots are given back")
