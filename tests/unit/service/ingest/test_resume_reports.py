"""The state from which an attempt resumed is shown with the attempt, and reported once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dray import views
from dray.spec import JobSpec
from ray_workers.shared.contracts import WORKER_MTBF_S, Cause, FrameKind, Phase
from ray_workers.shared.processes.machine_speed import OVERLOADED, overload_note
from service.domain.attempts.reliability import Seen, worker_mtbf_s
from service.loops.scheduling import starter
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import SHA, Service, frame, metrics, resumed

pytestmark = RULES

TOLD: dict[str, Any] = {
    "step": 40,
    "url": "file:///s/step-40",
    "sha256": SHA,
    "size_bytes": 1000,
    "position": {"epoch": 3, "step_in_epoch": 4, "samples": 800},
    "world_size": 3,
    "optimizer_restored": True,
    "rng": "seeds",
    "loss_before": 0.25,
    "passed_over": [{"step": 60, "why": "bit flip"}, {"step": 50, "why": "torn"}],
}


async def second_attempt(service: Service, body: dict[str, Any]) -> str:
    job_id = await service.running(max_retries=5)
    service.report(job_id, 1, [metrics(40, {"train/loss": 0.25})])
    service.end(job_id, 1, Cause.WORKER_LOST)
    assert service.claim(job_id, 1) is not None
    service.report(job_id, 2, [frame(FrameKind.RESUMED, body)])
    return job_id


async def shown(service: Service, job_id: str) -> views.Receipt | None:
    return (await service.queries.attempts(job_id)).items[-1].receipt


async def told(service: Service, job_id: str) -> list[views.Event]:
    events = (await service.queries.events(job_id)).items
    return [event for event in events if event.type == "resumed"]


async def test_a_receipt_is_shown_at_once_and_told_with_the_loss_of_the_first_step(
    service: Service,
) -> None:
    job_id = await second_attempt(service, TOLD)
    receipt = await shown(service, job_id)
    assert receipt is not None
    assert receipt.model_dump() == TOLD | {"loss_after": None}
    assert await told(service, job_id) == []
    theirs = metrics(41, {"perf/step_time_s": 1.0}, rank=1)
    service.report(job_id, 2, [theirs, metrics(41, {"train/loss": 0.24})])
    service.report(job_id, 2, [metrics(42, {"train/loss": 0.1})])
    receipt = await shown(service, job_id)
    assert receipt is not None
    assert (receipt.loss_before, receipt.loss_after) == (0.25, 0.24)
    (event,) = await told(service, job_id)
    assert event.data == TOLD | {"loss_after": 0.24}
    assert event.message == (
        "resumed from the checkpoint of step 40; skipped damaged checkpoints (step 60, 50); "
        "training loss 0.25 before the resume and 0.24 after it"
    )


async def test_the_receipt_and_the_first_step_may_come_in_one_reply(service: Service) -> None:
    job_id = await service.running()
    service.end(job_id, 1, Cause.WORKER_LOST)
    service.claim(job_id, 1)
    first = metrics(41, {"train/loss": float("nan")})
    service.report(job_id, 2, [frame(FrameKind.RESUMED, TOLD), first])
    receipt = await shown(service, job_id)
    assert receipt is not None
    assert receipt.loss_after == "NaN"
    assert len(await told(service, job_id)) == 1


@pytest.mark.parametrize("cause", [Cause.SUCCEEDED, Cause.WORKER_LOST])
async def test_without_a_step_it_is_told_at_the_attempts_end(
    service: Service, cause: Cause
) -> None:
    job_id = await second_attempt(service, TOLD)
    service.end(job_id, 2, cause)
    (event,) = await told(service, job_id)
    assert event.data["loss_after"] is None


async def test_steps_whose_metrics_went_with_their_node_are_told(service: Service) -> None:
    job_id = await second_attempt(service, TOLD | {"step": 47, "passed_over": []})
    service.report(job_id, 2, [metrics(48, {"train/loss": 0.2})])
    (event,) = await told(service, job_id)
    assert event.message.endswith("0.2 after it; the metrics of steps 41 to 47 are lost")


async def test_a_fresh_start_has_no_receipt(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    service.report(job_id, 1, [resumed(0), metrics(1, {"train/loss": 1.0})])
    assert await shown(service, job_id) is None
    assert await told(service, job_id) == []


async def test_that_nothing_was_sound_is_told(service: Service) -> None:
    body = {"step": 0, "url": "", "passed_over": TOLD["passed_over"]}
    job_id = await second_attempt(service, body)
    service.report(job_id, 2, [metrics(1, {"train/loss": 2.0})])
    (event,) = await told(service, job_id)
    assert event.message == "started from scratch; skipped damaged checkpoints (step 60, 50)"


async def test_what_is_another_jobs_is_told_as_that(service: Service) -> None:
    source = await service.running()
    service.report(source, 1, [service.checkpoint(source, 1, 40)])
    job_id = await service.running(init_from={"job": source, "take": "everything"})
    url = service.url(source, 1, "checkpoints/step-40")
    body = {**TOLD, "url": url, "passed_over": []}
    service.report(job_id, 1, [frame(FrameKind.RESUMED, body), metrics(41, {"train/loss": 0.2})])
    (event,) = await told(service, job_id)
    assert event.message.startswith("resumed from another job's checkpoint of step 40; training")


async def test_text_in_it_is_stored_visibly(service: Service) -> None:
    body = TOLD | {"rng": "a\0b \ud800"}
    receipt = await shown(service, await second_attempt(service, body))
    assert receipt is not None
    assert receipt.rng == "a␀b ?"


@pytest.mark.parametrize(
    "wrong",
    [
        {"sha256": "x"},
        {"size_bytes": -1},
        {"loss_before": float("inf")},
        {"loss_before": "low"},
        {"passed_over": [{"step": 1, "why": "x"}] * 101},
        {"passed_over": [{"step": "1", "why": "x"}]},
        {"position": {"epoch": 1}},
        {"url": "x" * 3000},
        {"optimizer_restored": "yes"},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
@ON_SQLITE
async def test_a_receipt_that_is_malformed_is_refused_and_the_step_is_kept(
    service: Service, wrong: dict[str, Any]
) -> None:
    job_id = await second_attempt(service, TOLD | wrong)
    (*_, attempt) = (await service.queries.attempts(job_id)).items
    assert (attempt.resume_step, attempt.receipt) == (40, None)
    types = [event.type for event in (await service.queries.events(job_id)).items]
    assert "frames_refused" in types


def test_workers_are_taken_to_last_a_day_until_more_is_seen() -> None:
    day = 24 * 3600.0
    assert worker_mtbf_s(Seen(), Seen(), prior_s=day) == day
    assert worker_mtbf_s(Seen(99 * day, 0), Seen(), prior_s=day) == 100 * day
    assert worker_mtbf_s(Seen(9 * day, 4), Seen(), prior_s=day) == 2 * day


def test_a_job_that_loses_more_than_others_goes_by_its_own_figures() -> None:
    everywhere = Seen(worker_s=999.0, num_losses=9)
    assert worker_mtbf_s(everywhere, Seen(), prior_s=1.0) == 100.0
    assert worker_mtbf_s(everywhere, Seen(20.0, 5), prior_s=1.0) == 20.0
    assert worker_mtbf_s(everywhere, Seen(500.0, 0), prior_s=1.0) == 100.0


async def test_losses_of_workers_count_by_the_time_that_they_ran(service: Service) -> None:
    async def lose(cause: Cause, workers: int, seconds: float, message: str = "") -> str:
        job_id = await service.submit(resources={"num_workers": workers})
        service.claim(job_id, workers=workers)
        service.report(job_id, 1, phase=Phase.RUNNING)
        service.advance(seconds)
        service.end(job_id, 1, cause, message)
        return job_id

    def mtbf(job_id: str) -> float:
        return service.database.read_sync(lambda s: starter.worker_mtbf(s, job_id, service.now))

    assert mtbf("job-none") == WORKER_MTBF_S
    await lose(Cause.SUCCEEDED, 1, 3600.0)
    await lose(Cause.USER_ERROR, 1, 1800.0)
    await lose(Cause.WORKER_LOST, 1, 1800.0, f"no answer{overload_note(OVERLOADED)}")
    lost = await lose(Cause.NODE_LOST, 2, 7200.0)
    assert mtbf("job-none") == pytest.approx((WORKER_MTBF_S + 2 * 3600 + 2 * 7200) / 2)
    assert mtbf(lost) == pytest.approx((mtbf("job-none") + 2 * 7200) / 2)
    service.advance(timedelta(days=31).total_seconds())
    assert mtbf(lost) == WORKER_MTBF_S


def test_only_a_job_that_asks_for_it_is_told() -> None:
    def asks(**said: Any) -> bool:
        spec = JobSpec(recipe="image_classification", **said)
        return starter.saves_by_losses(spec.model_dump(mode="json"))

    assert asks(checkpoint={"every_steps": "auto"})
    assert not asks(checkpoint={"every_steps": 5})
    assert not asks()
