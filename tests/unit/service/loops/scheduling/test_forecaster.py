"""Forecasts, dry runs, and stored decisions, in a service that runs its loops."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from dray import views
from dray.filters import JobFilter
from dray.requests import JobChangeRequest
from dray.spec import JobSpec
from dray.views import JobState
from service.domain.errors import DecisionNotFound, UnknownQueue, Unsatisfiable
from service.domain.scheduling.outlook.situation import UNKNOWN_S
from service.jobs.changes import JobChanges
from service.outlook import forecasts
from service.outlook.answers import Answers
from service.runtime import Runtime
from tests.unit.service.loops.world import PATIENCE_S, World, comes_to, eventually


@pytest.fixture(autouse=True)
def quick_forecasts(world: World) -> None:
    world.set_timings(forecast_pause_s=0.01, forecast_period_s=0.05)


async def forecast(runtime: Runtime, job_id: str) -> views.Explanation:
    """Wait until the explanation has a forecast, and return it."""

    async def made() -> views.Explanation | None:
        told = await runtime.queries.explain(job_id)
        return told if told.start or told.end else None

    found = await eventually(made, f"{job_id} never got a forecast")
    assert found is not None
    return found


def spec(**fields: object) -> JobSpec:
    return JobSpec.model_validate({"recipe": "image_classification", "name": "trains", **fields})


async def test_a_waiting_job_is_told_when_it_will_start_and_the_error_is_measured(
    world: World,
) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=4, max_runtime_s=3000)
    await comes_to(runtime, first, JobState.RUNNING)
    second = await world.submit(runtime, workers=2)
    told = await forecast(runtime, second)
    assert told.start is not None
    assert told.start.at is not None
    assert told.start.earliest_at is not None
    assert told.start.latest_at is not None
    assert told.start.earliest_at <= told.start.at <= told.start.latest_at
    assert told.expected_start_at == told.start.at
    ahead = told.start.at - told.start.made_at
    assert timedelta(0) <= ahead <= timedelta(seconds=UNKNOWN_S)
    assert told.position == 1
    await runtime.jobs.cancel(first)
    await comes_to(runtime, second, JobState.SUCCEEDED)

    async def measured() -> bool:
        return (await runtime.queries.forecast_errors()).starts.count > 0

    await eventually(measured, "the error of the start was never measured")
    error = (await runtime.queries.forecast_errors()).starts
    assert error.median_s is not None
    assert error.median_s > 0
    assert (await runtime.queries.explain(second)).start is None


async def test_a_forecaster_goes_on_after_a_commit_of_which_it_did_not_hear(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, is_lost = forecasts.Forecasts.stored, asyncio.Event()

    def loses_the_first_answer(self: forecasts.Forecasts, changes: Any) -> None:
        if not is_lost.is_set():
            is_lost.set()
            raise ConnectionError("the answer was lost")
        store(self, changes)

    monkeypatch.setattr(forecasts.Forecasts, "stored", loses_the_first_answer)
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, first, JobState.RUNNING)
    await is_lost.wait()
    await forecast(runtime, await world.submit(runtime))


async def test_of_a_job_that_reports_no_steps_no_end_is_expected(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits")
    await comes_to(runtime, job_id, JobState.RUNNING)
    end = (await forecast(runtime, job_id)).end
    assert end is not None
    assert end.reason is not None
    assert (end.at, end.reason.code) == (None, "unknown_length")


async def test_a_held_job_is_told_that_nobody_knows_when_it_starts(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, first, JobState.RUNNING)
    second = await world.submit(runtime)
    await JobChanges(runtime.database, runtime.settings).change(second, JobChangeRequest(held=True))

    async def says_so() -> bool:
        start = (await runtime.queries.explain(second)).start
        return start is not None and start.reason is not None and start.reason.code == "held"

    await eventually(says_so, "the explanation never showed that it is held")


async def test_counterfactuals_name_what_would_start_now(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=3)
    await comes_to(runtime, first, JobState.RUNNING)
    second = await world.submit(runtime, workers=2)

    async def told() -> list[str]:
        found = (await runtime.queries.explain(second)).counterfactuals
        return [each.message for each in found]

    assert "starts now with 1 worker" in await eventually(told, "there is no counterfactual")


async def test_a_dry_run_says_what_would_happen_and_stores_nothing(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=3)
    await comes_to(runtime, first, JobState.RUNNING)
    await forecast(runtime, first)

    pair = spec(resources={"num_workers": 2})

    async def one_would_start_and_two_would_wait() -> bool:
        one, two = [await runtime.jobs.dry_run(each) for each in (spec(), pair)]
        return (one.reason.code, two.reason.code) == ("would_start", "waiting_for_slots")

    await eventually(one_would_start_and_two_would_wait, "the free slot is not seen")
    told = await runtime.jobs.dry_run(pair)
    assert told.reason.code == "waiting_for_slots"
    assert (told.state, told.position, told.queue_length) == (JobState.QUEUED, 1, 1)
    assert told.blocked_by == [first]
    assert told.start is not None
    assert told.start.at is not None
    assert "starts now with 1 worker" in [each.message for each in told.counterfactuals]
    page = await runtime.jobs.list(JobFilter())
    assert [job.id for job in page.items] == [first]


async def test_a_dry_run_makes_its_answer_while_others_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has only one writer, and a response can take long."""
    runtime = await world.open()
    await comes_to(runtime, await world.submit(runtime), JobState.SUCCEEDED)
    answer, loop, written = Answers.of_unsubmitted, asyncio.get_running_loop(), []

    def slow(self: Answers, *arguments: Any) -> views.Explanation:
        submitting = asyncio.run_coroutine_threadsafe(world.submit(runtime), loop)
        written.append(submitting.result(PATIENCE_S))
        return answer(self, *arguments)

    monkeypatch.setattr(Answers, "of_unsubmitted", slow)
    await runtime.jobs.dry_run(spec())
    assert len(written) == 1


async def test_a_dry_run_refuses_what_a_submit_refuses(world: World) -> None:
    runtime = await world.open()
    await comes_to(runtime, await world.submit(runtime), JobState.SUCCEEDED)
    with pytest.raises(UnknownQueue):
        await runtime.jobs.dry_run(spec(queue="nowhere"))
    with pytest.raises(Unsatisfiable) as refused:
        await runtime.jobs.dry_run(spec(resources={"num_workers": 9}))
    assert refused.value.pointer == "/resources/num_workers"


async def test_a_round_that_started_a_job_is_kept_and_decided_the_same_again(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)

    async def kept() -> list[views.Decision]:
        return (await runtime.queries.decisions()).items

    (found,) = await eventually(kept, "no round was stored")
    assert found.started == [job_id]
    replayed = await runtime.queries.decision(found.number)
    assert replayed.is_same
    (decided,) = replayed.decided
    assert (decided.job_id, decided.decision, decided.num_workers) == (job_id, "start", 1)
    assert replayed.replayed == replayed.decided
    with pytest.raises(DecisionNotFound):
        await runtime.queries.decision(found.number + 1)
