"""Jobs whose roles have their own resources, while the loops run."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from service.runtime import Runtime
from tests.unit.service.loops.world import World, comes_to, eventually, says

pytestmark = pytest.mark.anyio


ROLES = {"worker": {"num_workers": 2}, "ps": {"resources": {"cpus": 3}}}
PROGRAMS: tuple[dict[str, Any], ...] = (
    {
        "recipe": "image_classification",
        "sync": {"kind": "parameter_server", "server_resources": {"cpus": 3}},
    },
    {"script": {"entrypoint": "/train.py", "roles": ROLES}},
)
"""Two workers with GPUs, and a server with 3 CPUs."""


async def submit(runtime: Runtime, play: str, program: dict[str, Any]) -> str:
    resources = {"num_workers": 3, "gpus_per_worker": 1}
    document = {"name": play, "resources": resources, **program}
    job, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    return job.id


async def test_a_gang_with_servers_holds_what_it_asked_for_and_gives_it_back(world: World) -> None:
    node = world.fake.nodes["node-a"]
    node.resources |= {"CPU": 8.0, "GPU": 4.0}
    runtime = await world.open()
    first = await submit(runtime, "waits", PROGRAMS[0])
    await comes_to(runtime, first, JobState.RUNNING)
    assert node.held == {"CPU": 5.0, "GPU": 2.0}
    second = await submit(runtime, "trains", PROGRAMS[1])
    explained = await says(runtime, second, "waiting_for_slots")
    asked = "needs 2 workers of 1 CPU and 1 GPU, and 1 ps of 3 CPU"
    assert explained.reason.message.startswith(asked)
    await runtime.jobs.cancel(first)
    await comes_to(runtime, second, JobState.SUCCEEDED)

    async def is_free() -> bool:
        return not any(node.held.values())

    await eventually(is_free, "all slots are released")
