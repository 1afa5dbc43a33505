"""The latest, minimum, and maximum values of series, for searches and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace

from ray_workers.shared.contracts import Cause
from service.db.repositories.telemetry import metric_summaries
from service.db.repositories.telemetry.metric_summaries import MetricSummary
from service.telemetry.known_attempts import SUMMARISE_AFTER, KnownAttempts
from tests.unit.service.helpers import Service, metrics, resumed


def summaries(service: Service, job_id: str) -> dict[str, MetricSummary]:
    return service.database.read_sync(lambda s: metric_summaries.of_jobs(s, [job_id]))[job_id]


async def test_a_series_is_summarised_when_it_begins_now_and_then_and_at_the_end(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {"x": 5.0})])
    first = MetricSummary(1, 5.0, 1, 5.0, 1, 5.0)
    assert summaries(service, job_id) == {"x": first}
    service.report(job_id, 1, [metrics(2, {"x": 7.0})])
    assert summaries(service, job_id) == {"x": first}
    service.advance(SUMMARISE_AFTER.total_seconds())
    service.report(job_id, 1, [metrics(3, {"x": 4.0})])
    assert summaries(service, job_id) == {"x": MetricSummary(3, 4.0, 3, 4.0, 2, 7.0)}
    service.report(job_id, 1, [metrics(4, {"x": 9.0}), metrics(4, {"x": 99.0}, rank=1)])
    service.end(job_id, 1, frames=[metrics(5, {"x": math.nan})])
    assert summaries(service, job_id) == {"x": MetricSummary(5, None, 3, 4.0, 4, 9.0)}


async def test_a_series_of_nan_and_infinities_is_summarised(service: Service) -> None:
    job_id = await service.running()
    points = [metrics(1, {"x": math.nan, "y": math.inf}), metrics(2, {"x": math.nan, "y": 1.0})]
    service.end(job_id, 1, frames=points)
    assert summaries(service, job_id) == {
        "x": MetricSummary(2, None, None, None, None, None),
        "y": MetricSummary(2, 1.0, 2, 1.0, 1, math.inf),
    }


async def test_a_service_that_starts_again_knows_what_it_has_not_summarised(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {"x": 5.0})])
    service.report(job_id, 1, [metrics(2, {"x": 8.0})])
    service.known = KnownAttempts()
    service.report(job_id, 1, [metrics(3, {"x": 6.0})])
    assert summaries(service, job_id) == {"x": MetricSummary(3, 6.0, 1, 5.0, 2, 8.0)}


async def test_steps_that_were_repeated_count_once(service: Service) -> None:
    job_id = await service.running(max_retries=1)
    service.report(job_id, 1, [metrics(step, {"x": float(-step)}) for step in range(1, 7)])
    service.end(job_id, 1, Cause.NODE_LOST)
    assert summaries(service, job_id)["x"] == MetricSummary(6, -6.0, 6, -6.0, 1, -1.0)
    service.advance(3600)
    assert service.claim(job_id, 1) is not None
    service.report(job_id, 2, [resumed(3), metrics(4, {"x": 50.0})])
    after = MetricSummary(4, 50.0, 3, -3.0, 4, 50.0)
    assert summaries(service, job_id) == {"x": after}
    service.end(job_id, 2, frames=[metrics(5, {"x": -1.5})])
    assert summaries(service, job_id) == {"x": replace(after, last_step=5, last_value=-1.5)}
