"""When a budget is used up while the loops run, no job in the queue starts until it is
increased."""

from __future__ import annotations

import json
from pathlib import Path

from dray.queue_requests import QueueRequest
from dray.views import JobState
from service.queues.service import Queues
from tests.marks import ONE_SET
from tests.unit.service.loops.world import World, comes_to, says


@ONE_SET
async def test_jobs_wait_for_a_budget_and_those_of_others_pass(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "prices.json"
    rules = [{"resource": "CPU", "per_hour": 3600}]
    path.write_text(json.dumps({"currency": "EUR", "prices": rules}))
    runtime = await world.open(scheduler_tick_s=60.0, prices_file=path)

    async def give(name: str, budget: float | None) -> None:
        rules = QueueRequest.model_validate({"budget": budget})
        await Queues(runtime.database, runtime.prices).put(name, rules)

    for name in ("night", "day"):
        await give(name, None)
    done = await comes_to(runtime, await world.submit(runtime, queue="night"), JobState.SUCCEEDED)
    assert done.cost is not None
    assert done.cost.total > 1e-9
    running = await world.submit(runtime, "waits", queue="night")
    await comes_to(runtime, running, JobState.RUNNING)
    await give("night", 1e-9)
    second = await world.submit(runtime, queue="night")
    waits = await says(runtime, second, "budget_used_up")
    assert "the queue 'night' has exhausted its budget of 1e-09 EUR" in waits.reason.message
    passes = await world.submit(runtime, queue="day")
    await comes_to(runtime, passes, JobState.SUCCEEDED)
    assert (await runtime.jobs.get(running)).state is JobState.RUNNING
    (event,) = [e for e in (await runtime.queries.events(second)).items if e.type == "budget"]
    assert (event.code, event.message) == ("budget_used_up", waits.reason.message)
    await give("night", 1e9)
    await comes_to(runtime, second, JobState.SUCCEEDED)
