"""Queues and the queue positions of jobs in both clients."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from dray import AsyncClient, Client, Retry, errors, views
from tests.unit.api.serving import LiveServer
from tests.unit.sdk.lossy import Lossy

JOB = {"recipe": "image_classification"}


def test_a_queue_is_made_changed_listed_and_deleted(client: Client) -> None:
    limit = {"GPU": 8, "memory": "8GiB", "CPU": None}
    made = client.set_queue("sdk", limit=limit, max_queued=3, max_running=None)
    assert (made.limit, made.max_queued) == ({"GPU": 8.0, "memory": 8.0 * 2**30}, 3)
    changed = client.set_queue("sdk", limit={"memory": None}, max_queued=None)
    assert (changed.limit, changed.max_queued) == ({"GPU": 8.0}, None)
    changed = client.set_queue("sdk", user_weights={"ann": 2})
    assert (changed.limit, changed.user_weights) == ({"GPU": 8.0}, {"ann": 2.0})
    assert client.queue("sdk") == changed
    assert changed in client.queues()
    with pytest.raises(errors.InvalidQueue) as told:
        client.set_queue("sdk", quota={"GPU": 9})
    assert told.value.pointer == "/limit/GPU"
    with pytest.raises(errors.Unprocessable, match="no field 'wieght'"):
        client.set_queue("sdk", wieght=1)
    with pytest.raises(errors.SpecError):
        client.set_queue("sdk", weight=float("nan"))
    client.delete_queue("sdk")
    for call in (client.queue, client.delete_queue):
        with pytest.raises(errors.QueueNotFound):
            call("sdk")
    with pytest.raises(errors.QueueInUse):
        client.delete_queue("default")


def test_both_clients_report_shares_and_factors(server: LiveServer, client: Client) -> None:
    job = client.submit(JOB)
    report, factors = client.shares(queue="default"), client.factors(job.id)
    assert [warning.code for warning in report.warnings] == ["no_forecast"]
    assert factors.reason is not None
    assert (factors.position, factors.reason.code) == (None, "no_forecast")
    with pytest.raises(errors.QueueNotFound):
        client.shares(queue="sdk-none")

    async def ask() -> tuple[views.ShareReport, views.JobFactors]:
        async with AsyncClient(server.url) as other:
            return await other.shares(user="ann"), await other.factors(job.id)

    assert asyncio.run(ask()) == (report, factors)
    client.cancel(job.id)


def test_a_job_is_held_released_moved_and_raised(client: Client) -> None:
    client.set_queue("sdk-jobs", max_queued_per_user=1)
    job = client.submit(JOB)
    assert client.hold(job.id).held_by == "anonymous"
    assert client.release(job.id).held_by is None
    moved = client.move(job.id, "sdk-jobs", first=True)
    assert moved.queue == "sdk-jobs"
    assert client.set_priority(job.id, 70).priority == 70
    with pytest.raises(errors.QueueFull):
        client.submit({**JOB, "queue": "sdk-jobs"})
    with pytest.raises(errors.QueueFull):
        client.move(client.submit(JOB).id, "sdk-jobs")
    with pytest.raises(errors.UnknownQueue, match="did you mean 'sdk-jobs'"):
        client.submit({**JOB, "queue": "sdk-job"})
    with pytest.raises(errors.Unprocessable, match="at least one of queue"):
        client.move(job.id)
    client.cancel(job.id)
    with pytest.raises(errors.JobFinished):
        client.hold(job.id)


def test_of_two_who_make_a_queue_at_once_neither_loses_a_rule(server: LiveServer) -> None:
    rules = [{"weight": 2}, {"max_queued": 3}, {"limit": {"GPU": 8}}, {"user_weights": {"ann": 2}}]
    with Client(server.url) as client, ThreadPoolExecutor(len(rules)) as threads:
        for number in range(5):
            name = f"sdk-at-once-{number}"
            list(threads.map(lambda rule, name=name: client.set_queue(name, **rule), rules))
            made = client.queue(name)
            assert (made.weight, made.max_queued) == (2.0, 3)
            assert (made.limit, made.user_weights) == ({"GPU": 8.0}, {"ann": 2.0})
            client.delete_queue(name)


def test_a_deletion_whose_answer_was_lost_is_done(server: LiveServer) -> None:
    transport = Lossy()
    server.queue("sdk-lost")
    with Client(server.url, transport=transport, retry=Retry(patience_s=60)) as client:
        client.delete_queue("sdk-lost")
    assert transport.lost
    assert server.ask("GET", "/v1/queues/sdk-lost").status_code == 404


def test_the_other_client_does_the_same(server: LiveServer) -> None:
    async def work() -> list[views.Queue]:
        async with AsyncClient(server.url) as client:
            await client.set_queue("sdk-async", weight=2)
            job = await client.submit(JOB)
            assert (await client.hold(job.id)).held_by
            assert not (await client.release(job.id)).held_by
            assert (await client.move(job.id, "sdk-async")).queue == "sdk-async"
            assert (await client.set_priority(job.id, 10)).priority == 10
            found = await client.queues()
            assert await client.queue("sdk-async") in found
            await client.move(job.id, "default")
            await client.delete_queue("sdk-async")
            return found

    assert "sdk-async" in [queue.name for queue in asyncio.run(work())]
