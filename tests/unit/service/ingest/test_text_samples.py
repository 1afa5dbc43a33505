"""Texts that models generate are stored once for each step, within limits."""

from __future__ import annotations

from typing import Any

import pytest

from dray import views
from ray_workers.shared.contracts import Frame, FrameKind
from service.db.repositories.telemetry import text_samples as repository
from service.domain.errors import BadCursor, NotFound
from service.jobs.text_samples import SampleListing
from tests.unit.service.helpers import Service, events_of, frame

PROMPTS = ["the cat", [{"role": "user", "content": "hello"}]]
TUNING = {
    "recipe": "fine_tuning",
    "model": {"base": "s3://models/llama"},
    "data": {"source": "s3://data/a.jsonl"},
    "samples": {"prompts": PROMPTS},
}


def texts(step: Any, *given: Any, rank: int = 0) -> Frame:
    return frame(FrameKind.SAMPLES, {"step": step, "texts": list(given)}, rank=rank)


async def listed(service: Service, job_id: str, **query: Any) -> views.SampledTextsPage:
    return await SampleListing(service.database).list(job_id, **query)


async def test_texts_are_listed_in_the_order_of_their_steps(service: Service) -> None:
    job_id = await service.running(**TUNING)
    assert (await listed(service, job_id)).items == []
    service.report(job_id, 1, [texts(8, " sees", "hi")])
    service.report(job_id, 1, [texts(4, " likes\0", "\ud800 hé")])
    page = await listed(service, job_id)
    assert page.prompts == PROMPTS
    assert [(one.step, one.attempt) for one in page.items] == [(4, 1), (8, 1)]
    assert page.items[0].texts == [" likes␀", "? hé"]
    assert page.next_cursor is None
    (one,) = (await listed(service, job_id, step=8)).items
    assert one.texts == [" sees", "hi"]
    assert (await listed(service, job_id, step=5)).items == []


async def test_a_later_evaluation_of_a_step_replaces_its_texts(service: Service) -> None:
    job_id = await service.running(**TUNING)
    for text in ("one", "other"):
        service.report(job_id, 1, [texts(4, text)])
    (one,) = (await listed(service, job_id)).items
    assert one.texts == ["other"]


async def test_pages_have_every_step_once(service: Service) -> None:
    job_id = await service.running(**TUNING)
    service.report(job_id, 1, [texts(step, str(step)) for step in range(1, 8)])
    found, cursor = [], None
    while True:
        page = await listed(service, job_id, limit=3, cursor=cursor)
        found += [one.step for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [*range(1, 8)]
    other = await service.running(**TUNING)
    with pytest.raises(BadCursor):
        await listed(service, other, cursor="x")
    with pytest.raises(NotFound):
        await listed(service, "job-nothing")


async def test_only_the_newest_steps_are_kept(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MAX_STEPS", 3)
    job_id, other = await service.running(**TUNING), await service.running(**TUNING)
    service.report(other, 1, [texts(1, "kept")])
    service.report(job_id, 1, [texts(step, "x") for step in range(1, 8)])
    assert [one.step for one in (await listed(service, job_id)).items] == [5, 6, 7]
    assert len((await listed(service, other)).items) == 1


async def test_frames_of_user_code_are_bounded(service: Service) -> None:
    job_id = await service.running(**TUNING)
    refused = [
        texts(-1, "a"),
        texts("x", "a"),
        texts(2**60, "a"),
        texts(True, "a"),
        frame(FrameKind.SAMPLES, {"step": 1}),
        frame(FrameKind.SAMPLES, {"step": 1, "texts": "abc"}),
        frame(FrameKind.SAMPLES, {"step": 1, "texts": None}),
    ]
    service.report(job_id, 1, refused)
    assert (await listed(service, job_id)).items == []
    assert len(await events_of(service, job_id, "frames_refused")) == 1
    service.report(job_id, 1, [texts(1, *["a" * 5000] * 20)])
    (one,) = (await listed(service, job_id)).items
    assert [len(text) for text in one.texts] == [4096] * 16


async def test_texts_are_deleted_with_their_job(service: Service) -> None:
    job_id = await service.running(**TUNING)
    service.report(job_id, 1, [texts(1, "a")])
    service.end(job_id, 1)
    await service.jobs.delete(job_id)
    with pytest.raises(NotFound):
        await listed(service, job_id)
    with service.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM text_samples").scalar() == 0
