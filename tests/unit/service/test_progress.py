"""Rates and the expected end come from a running attempt, and the link to the dashboard is
valid."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dray import views
from dray.views import JobState
from ray_workers.shared.contracts import Cause, Frame, Phase
from service.cluster.port import ClusterSnapshot
from service.config.settings import Settings
from service.jobs.status_cache import StatusCache
from service.nodes import node_table
from service.runtime import Runtime
from tests.marks import RULES
from tests.unit.service.helpers import Service, metrics, regrouped, regrouping

pytestmark = RULES

Step = Callable[[Service, str], Awaitable[object]]


def at(step: int) -> Frame:
    return metrics(step, {"x": 1.0}, total_steps=100, samples_per_s=50.0)


async def training(service: Service) -> str:
    job_id = await service.submit(resources={"num_workers": 2})
    service.claim(job_id, workers=2)
    for step in range(1, 11):
        service.advance(2)
        service.report(job_id, 1, [replace(at(step), time=service.now.timestamp())])
    return job_id


NO_RATES = (None, None, None)


def rates(job: views.Job) -> tuple[object, ...]:
    assert job.progress is not None
    progress = job.progress
    return progress.samples_per_s, progress.earliest_end_at, progress.latest_end_at


async def lose_the_node(service: Service, job_id: str) -> None:
    service.end(job_id, 1, Cause.NODE_LOST)


async def start_again(service: Service, job_id: str) -> None:
    await lose_the_node(service, job_id)
    service.claim(job_id, 1, workers=2)


async def lose_a_rank(service: Service, job_id: str) -> None:
    service.report(job_id, 1, [regrouping(1)])


async def cancel(service: Service, job_id: str) -> None:
    await service.jobs.cancel(job_id)
    service.report(job_id, 1, [at(11)])


async def cancel_to_the_end(service: Service, job_id: str) -> None:
    await service.jobs.cancel(job_id)
    service.end(job_id, 1, Cause.STOPPED)


async def succeed(service: Service, job_id: str) -> None:
    service.end(job_id, 1, frames=[at(11)])


async def fail(service: Service, job_id: str) -> None:
    service.end(job_id, 1, Cause.BAD_DATA)


@pytest.mark.parametrize(
    ("leave", "state"),
    [
        (lose_the_node, JobState.QUEUED),
        (start_again, JobState.STARTING),
        (lose_a_rank, JobState.RECOVERING),
        (cancel, JobState.CANCELLING),
        (cancel_to_the_end, JobState.CANCELLED),
        (succeed, JobState.SUCCEEDED),
        (fail, JobState.FAILED),
    ],
)
async def test_only_a_running_job_has_a_rate_and_an_expected_end(
    service: Service, leave: Step, state: JobState
) -> None:
    job_id = await training(service)
    before = await service.jobs.get(job_id)
    assert rates(before)[0] == 50.0
    assert None not in rates(before)
    await leave(service, job_id)
    job = await service.jobs.get(job_id)
    assert job.state is state
    assert rates(job) == NO_RATES
    assert job.progress is not None
    assert (job.progress.step, job.progress.total_steps) in ((10, 100), (11, 100))
    assert rates((await service.jobs.list()).items[0]) == NO_RATES
    assert b'"samples_per_s":null' in await StatusCache(service.database).read(job_id)


async def test_while_the_cluster_is_silent_a_job_has_no_rate_and_explain_says_why(
    service: Service,
) -> None:
    job_id = await training(service)
    why = "Ray did not respond to snapshot in time"
    service.database.write_sync(lambda s: node_table.store(s, None, why, service.now))
    assert rates(await service.jobs.get(job_id)) == NO_RATES
    assert rates((await service.jobs.list()).items[0]) == NO_RATES
    assert b'"samples_per_s":null' in await StatusCache(service.database).read(job_id)
    said = f"the cluster does not respond: {why}"
    assert said in (await service.queries.explain(job_id)).reason.message
    see_cluster(service)
    assert rates(await service.jobs.get(job_id))[0] == 50.0
    assert b'"samples_per_s":50.0' in await StatusCache(service.database).read(job_id)
    assert said not in (await service.queries.explain(job_id)).reason.message
    service.database.write_sync(lambda s: node_table.store(s, None, why, service.now))
    service.end(job_id, 1)
    assert said not in (await service.queries.explain(job_id)).reason.message


async def test_a_new_attempt_does_not_take_over_the_rate_of_the_one_before(
    service: Service,
) -> None:
    job_id = await training(service)
    await start_again(service, job_id)
    service.report(job_id, 2, [metrics(1, {"x": 1.0}, total_steps=100)])
    job = await service.jobs.get(job_id)
    assert job.state is JobState.RUNNING
    assert rates(job) == NO_RATES


async def test_nor_does_a_repaired_group(service: Service) -> None:
    job_id = await training(service)
    await lose_a_rank(service, job_id)
    service.report(job_id, 1, [regrouped(1)], phase=Phase.RUNNING)
    job = await service.jobs.get(job_id)
    assert job.state is JobState.RUNNING
    assert rates(job) == NO_RATES


def see_cluster(service: Service) -> None:
    picture = ClusterSnapshot(
        session="s", address="head:6379", dashboard_url="http://dash", nodes=(), shared=False
    )
    service.database.write_sync(lambda s: node_table.store(s, picture, None, service.now))


async def _link(service: Service, job_id: str) -> str | None:
    links = [
        (await service.jobs.get(job_id)).links.ray_dashboard,
        (await service.jobs.list()).items[0].links.ray_dashboard,
        (await service.queries.cluster()).ray_dashboard,
    ]
    (link,) = set(links)
    assert (b'"ray_dashboard":null' in await StatusCache(service.database).read(job_id)) is (
        link is None
    )
    return link


async def test_a_dashboard_is_linked_while_its_ray_answers(service: Service) -> None:
    job_id = await service.submit()
    assert await _link(service, job_id) is None
    see_cluster(service)
    assert await _link(service, job_id) == "http://dash"
    service.database.write_sync(lambda s: node_table.store(s, None, "gone", service.now))
    assert await _link(service, job_id) is None


async def test_after_a_crash_no_dashboard_is_linked_before_ray_answers(
    sqlite_service: Service, tmp_path: Path
) -> None:
    see_cluster(sqlite_service)
    url = sqlite_service.database.url.render_as_string()
    runtime = await Runtime.open(Settings(home=tmp_path, database_url=url), loops=False)
    try:
        cluster = await runtime.queries.cluster()
        assert (cluster.connected, cluster.ray_dashboard) == (False, None)
    finally:
        await runtime.stop()
