"""A reply is stored as if its frames had been stored individually, regardless of their contents."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from ray_workers.shared.contracts import Frame
from service.db.models import AttemptRow, EventRow, JobRow, MetricChunkRow
from service.ingest import metric_columns
from service.ingest.metric_columns import run_of, runs
from service.ingest.rank_frames import MAX_STEP
from tests.unit.service.helpers import START, Service, log, metrics

UNUSUAL: list[dict[str, Any]] = [
    {"step": True, "values": {"loss": 1.0}},
    {"step": -1, "values": {"loss": 1.0}},
    {"step": MAX_STEP + 1, "values": {"loss": 1.0}},
    {"step": "1", "values": {"loss": 1.0}},
    {"step": 1, "values": {"loss": "low"}},
    {"step": 1, "values": {"loss": 10**400}},
    {"step": 1, "values": {"loss": True}},
    {"step": 1, "values": {"lo\nss": 1.0}},
    {"step": 1, "values": {"": 1.0}},
    {"step": 1, "values": [1.0]},
    {"step": 1},
    {"values": {"loss": 1.0}},
    {"step": 1, "values": {"loss": 1.0}, "epoch": -1},
    {"step": 1, "values": {"loss": 1.0}, "total_steps": 1.5},
    {"step": 1, "values": {"loss": 1.0}, "samples_per_s": "fast"},
    {"step": 1, "values": {"loss": 1.0}, "found": 1},
]


def some_frames(seed: int) -> list[Frame]:
    """Return frames with mostly increasing steps of two ranks, evaluations, log lines, and some
    invalid frames."""
    chance = random.Random(seed)
    frames: list[Frame] = []
    step = 0
    while len(frames) < 120:
        step = max(0, step + chance.choice([1, 1, 1, 1, 1, 1, 0, -2]))
        at = START + timedelta(seconds=chance.randrange(1000))
        where = {"rank": chance.choice([0, 0, 0, 1]), "incarnation": chance.choice([0, 0, 0, 1])}
        values: dict[str, Any] = {"loss": chance.random(), "lr": chance.choice([0.1, math.nan])}
        more: dict[str, Any] = {}
        if chance.random() < 0.7:
            more = {
                "epoch": chance.randrange(5),
                "total_steps": 500,
                "samples_per_s": chance.choice([1.5, math.inf, 3]),
            }
        if values["loss"] < 0.2:
            more["found"] = True
        match chance.randrange(20):
            case 0:
                frames.append(metrics(step, {"val": chance.random()}, at=at))
            case 1:
                frames.append(log(len(frames), "a line", at=at))
            case 2:
                frames.append(metrics(step, {"loss": 3}, at=at, **where))
            case 3:
                body = chance.choice(UNUSUAL)
                frames.append(Frame(0, 0, frames[0].kind if frames else log(0, "").kind, 0.0, body))
            case _:
                frames.append(metrics(step, values, at=at, **where, **more))
    return frames


def stored(service: Service, job_id: str) -> dict[str, Any]:
    """Return everything that metric frames change."""

    def work(session: Any) -> dict[str, Any]:
        m = MetricChunkRow
        columns = [c for c in m.__table__.columns if c.name not in ("id", "job_id")]
        chunks = session.execute(
            select(*columns).where(m.job_id == job_id).order_by(m.rank, m.key, m.first_step)
        )
        job = session.scalars(select(JobRow).where(JobRow.id == job_id)).one()
        attempt = session.scalars(select(AttemptRow).where(AttemptRow.job_id == job_id)).one()
        types = session.scalars(select(EventRow.type).where(EventRow.job_id == job_id))
        return {
            "chunks": [tuple(row) for row in chunks],
            "progress": job.progress,
            "summary": job.summary,
            "keys": job.num_metric_keys,
            "first": (attempt.first_metric_step, attempt.first_metric_at, job.first_step_at),
            "events": sorted(types),
        }

    return service.database.read_sync(work)


@pytest.mark.parametrize("seed", range(8))
async def test_a_reply_is_stored_as_its_frames_one_by_one(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    service, frames = sqlite_service, some_frames(seed)
    by_run, by_frame = await service.running(), await service.running()
    service.report(by_run, 1, frames)
    monkeypatch.setattr(metric_columns, "run_of", lambda *_: None)
    service.report(by_frame, 1, frames)
    found = stored(service, by_run)
    assert found == stored(service, by_frame)
    assert found["chunks"], "something was stored"


@pytest.mark.parametrize("body", UNUSUAL, ids=repr)
async def test_what_is_unusual_in_a_run_costs_no_other_frame(
    sqlite_service: Service, body: dict[str, Any]
) -> None:
    service = sqlite_service
    job_id = await service.running()
    usual = [metrics(step, {"loss": float(step)}) for step in range(2, 10)]
    wrong = Frame(0, 0, usual[0].kind, START.timestamp(), body)
    service.report(job_id, 1, [*usual[:4], wrong, *usual[4:]])
    served = (await service.queries.metrics(job_id)).series["loss"]
    assert served.steps == list(range(2, 10))
    assert "frames_refused" in [e.type for e in (await service.queries.events(job_id)).items]


async def test_frames_alike_make_one_run_and_a_number_that_is_no_float_none() -> None:
    alike = [metrics(step, {"a": 1.0, "b": math.nan}) for step in range(1, 100)]
    other = [metrics(100, {"val": 1.0}), *[metrics(s, {"a": 1.0}, rank=1) for s in range(3)]]
    assert [len(run) for run in runs([*alike, *other])] == [99, 1, 3]
    run = run_of(alike, MAX_STEP)
    assert run is not None
    assert run.steps == list(range(1, 100))
    assert run.columns["a"] == (1.0,) * 99
    assert run_of([*alike, metrics(100, {"a": 1, "b": 1.0})], MAX_STEP) is None
