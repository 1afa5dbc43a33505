"""The scheduler keeps reserved nodes free for their jobs, also after a restart."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from dray import views
from dray.queue_requests import QueueRequest
from dray.reservations import ReservationRequest
from dray.views import JobState
from service.db.session import utc_now
from service.queues.reservations import Reservations
from service.queues.service import Queues
from service.runtime import Runtime
from tests.marks import RULES
from tests.unit.service.loops.world import (
    World,
    causes,
    comes_to,
    eventually,
    keeps_its_promises,
    says,
)

pytestmark = RULES


async def reserve(runtime: Runtime, name: str = "disks", **fields: Any) -> views.Reservation:
    """Create a reservation that begins now; by default, a maintenance window of an hour."""
    usual: dict[str, Any] = {"name": name, "duration_s": 3600}
    if not fields.keys() & {"users", "queues"}:
        usual["maintenance"] = True
    if not fields.keys() & {"nodes", "num_nodes"}:
        usual["all_nodes"] = True
    wanted = ReservationRequest.model_validate({**usual, **fields})
    return await Reservations(runtime.database).create(wanted)


async def codes(runtime: Runtime, job_id: str) -> list[str]:
    return [event.code for event in (await runtime.queries.events(job_id)).items]


async def test_jobs_leave_a_maintained_node_and_return_after_the_window(world: World) -> None:
    runtime = await world.open(preempt_grace_s=0.2)
    job_id = await world.submit(runtime, "waits", workers=2)
    await comes_to(runtime, job_id, JobState.RUNNING)
    window = await reserve(runtime)
    job = await says(runtime, job_id, "reserved")
    assert "the maintenance window 'disks' from" in job.reason.message
    assert await causes(runtime, job_id) == ["preempted"]
    found = await codes(runtime, job_id)
    assert found.count("reserved") == 1, "it was asked once"
    assert "makes_room" not in found
    other = await world.submit(runtime)
    await says(runtime, other, "reserved")
    await world.drop(runtime)
    first = await world.open(preempt_grace_s=0.2)
    second = await world.open(preempt_grace_s=0.2)
    await says(first, job_id, "reserved")
    await Reservations(second.database).delete(window.name)
    await comes_to(first, other, JobState.SUCCEEDED)
    await comes_to(first, job_id, JobState.RUNNING)
    assert (await first.jobs.get(job_id)).attempt == 2
    await first.jobs.cancel(job_id)
    await keeps_its_promises(world, first, other)


async def test_a_window_can_cancel_running_jobs_or_wait_for_them(world: World) -> None:
    runtime = await world.open(preempt_grace_s=0.2)
    job_id = await world.submit(runtime, "waits")
    await comes_to(runtime, job_id, JobState.RUNNING)
    window = await reserve(runtime, "waiting", at_begin="wait")
    other = await world.submit(runtime)
    await says(runtime, other, "reserved")
    assert (await runtime.jobs.get(job_id)).state == JobState.RUNNING
    await reserve(runtime, "cancelling", at_begin="cancel")
    job = await comes_to(runtime, job_id, JobState.CANCELLED)
    assert job.reason.code == "reservation_begins"
    assert job.reason.message.startswith("is cancelled, because the maintenance window")
    await Reservations(runtime.database).delete("cancelling")
    await Reservations(runtime.database).delete(window.name)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    await keeps_its_promises(world, runtime, job_id)


async def test_only_the_users_jobs_run_on_the_chosen_node(world: World) -> None:
    world.fake.add_node("node-b", {"CPU": 4.0})
    runtime = await world.open(preempt_grace_s=0.2)
    await reserve(runtime, "class", users=["ann"], num_nodes=1)

    async def chosen() -> list[str]:
        found = await Reservations(runtime.database).get("class", user=None)
        return [node.node_id for node in found.includes]

    (node,) = await eventually(chosen, "no node was chosen")
    mine = await world.submit(runtime, "waits", 4, "ann", reservation="class")
    others = [await world.submit(runtime, "waits", 2, "bob") for _ in range(3)]
    await comes_to(runtime, mine, JobState.RUNNING)
    for job_id in others[:2]:
        await comes_to(runtime, job_id, JobState.RUNNING)
    await says(runtime, others[2], "waiting_for_slots")
    places = {
        launch.job_id: {part.node_id for part in launch.slices} for launch in world.fake.launches
    }
    assert places[mine] == {node}
    assert all(node not in places[job_id] for job_id in others[:2])
    for job_id in (mine, *others):
        await runtime.jobs.cancel(job_id)


async def test_a_reservation_ends_by_itself(world: World) -> None:
    runtime = await world.open(preempt_grace_s=0.2)
    await reserve(runtime, "class", users=["ann"], all_nodes=True, duration_s=3)
    mine = await world.submit(runtime, "waits", 1, "ann", reservation="class")
    late = await world.submit(runtime, "trains", 4, "ann", reservation="class")
    other = await world.submit(runtime, owner="bob")
    await comes_to(runtime, mine, JobState.RUNNING)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    job = await says(runtime, late, "waiting_for_reservation")
    assert job.reason.message == "its reservation 'class' has ended or was deleted"
    assert (await runtime.jobs.get(mine)).state == JobState.RUNNING, "it continues"
    ended = await Reservations(runtime.database).get("class", user=None)
    assert ended.state == "ended"
    assert ended.ends_at <= utc_now() < ended.ends_at + timedelta(hours=1)
    for job_id in (mine, late):
        await runtime.jobs.cancel(job_id)


async def test_jobs_in_the_queues_under_a_reservations_queue_run_in_it(world: World) -> None:
    runtime = await world.open(preempt_grace_s=0.2)
    queues = Queues(runtime.database, runtime.prices)
    await queues.put("lab", QueueRequest())
    await reserve(runtime, "class", queues=["lab"], all_nodes=True)
    other = await world.submit(runtime)
    await says(runtime, other, "reserved")
    await queues.put("vision", QueueRequest(parent="lab"))
    mine = await world.submit(runtime, queue="vision", reservation="class")
    await comes_to(runtime, mine, JobState.SUCCEEDED)
    await runtime.jobs.cancel(other)


async def test_a_job_that_only_a_reservation_blocks_gets_suggestions(world: World) -> None:
    world.set_timings(forecast_pause_s=0.01, forecast_period_s=0.05)
    world.fake.add_node("node-b", {"CPU": 1.0})
    runtime = await world.open(preempt_grace_s=0.2)
    await Queues(runtime.database, runtime.prices).put("course", QueueRequest())
    await reserve(runtime, "class", queues=["course"], nodes=["node-a"], accepts_unnamed=True)
    job_id = await world.submit(runtime, "waits", workers=4)
    await says(runtime, job_id, "reserved")

    async def suggested() -> bool:
        found = (await runtime.queries.explain(job_id)).counterfactuals
        messages = [each.message for each in found]
        return messages == ["starts now with 1 worker", "starts now in queue 'course'"]

    await eventually(suggested, "there are no suggestions")
    await runtime.jobs.cancel(job_id)
