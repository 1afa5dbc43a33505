"""The latest points and lines of live attempts: stored with each reply, read like all others, and
finally moved to chunks."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select

from dray import views
from ray_workers.shared.contracts import Cause, Frame
from service.db.models import Base, LogChunkRow, MetricChunkRow, RecentMetricsRow
from service.domain.series import TIMES
from service.telemetry import known_attempts, metric_writer
from service.telemetry.known_attempts import KnownAttempt, KnownAttempts
from service.telemetry.log_writer import MAX_CHUNKS
from service.telemetry.metric_writer import MAX_ROWS, MAX_ROWS_BYTES
from service.telemetry.series_filters import MetricsFilter
from tests.marks import ONE_SET, soak
from tests.unit.service.helpers import Service, events_of, log, metrics, resumed


def count(service: Service, table: type[Base]) -> int:
    """Return the rows of the table, without chunks of times."""
    query = select(func.count()).select_from(table)
    if table is MetricChunkRow:
        query = query.where(MetricChunkRow.key != TIMES)
    return service.database.read_sync(lambda s: s.scalar(query) or 0)


def forget(service: Service) -> None:
    """Clear the cache, as a restart of the service would."""
    service.known = KnownAttempts()


async def steps_of(service: Service, job_id: str, key: str = "loss", **asked: Any) -> list[int]:
    found = await service.queries.metrics(job_id, MetricsFilter(**{"max_points": 100_000, **asked}))
    return found.series[key].steps if key in found.series else []


async def texts_of(service: Service, job_id: str) -> list[str]:
    return [line.text for line in (await service.queries.logs(job_id, limit=1000)).items]


def loss(step: int, rank: int = 0) -> Frame:
    return metrics(step, {"loss": 1.0 / step}, rank=rank)


async def test_points_of_a_reply_are_one_row_and_read_with_those_of_the_chunks(
    service: Service,
) -> None:
    job_id = await service.running()
    for step in range(1, 6):
        service.report(job_id, 1, [loss(step), loss(step, rank=1)])
    assert (count(service, MetricChunkRow), count(service, RecentMetricsRow)) == (2, 4)
    for rank in (0, 1):
        assert await steps_of(service, job_id, rank=rank) == [1, 2, 3, 4, 5]
    assert await steps_of(service, job_id, after_step=3) == [4, 5]
    assert await steps_of(service, job_id, keys=("other",)) == []
    found = await service.queries.metrics(job_id, MetricsFilter(max_points=2))
    assert found.series["loss"] == views.Series(steps=[1, 5], values=[1.0, 0.2])
    assert (await service.jobs.get(job_id)).summary["loss"] == 0.2


async def test_chunks_take_the_points_of_many_rows(service: Service) -> None:
    job_id = await service.running()
    for step in range(1, MAX_ROWS + 2):
        service.report(job_id, 1, [loss(step)])
    assert count(service, RecentMetricsRow) == MAX_ROWS
    service.report(job_id, 1, [loss(MAX_ROWS + 2)])
    assert (count(service, MetricChunkRow), count(service, RecentMetricsRow)) == (1, 0)
    assert await steps_of(service, job_id) == list(range(1, MAX_ROWS + 3))


async def test_much_at_once_goes_into_chunks(service: Service) -> None:
    job_id = await service.running()
    last = MAX_ROWS_BYTES // 16 + 10
    service.report(job_id, 1, [loss(1)])
    service.report(job_id, 1, [loss(2)])
    service.report(job_id, 1, [loss(step) for step in range(3, last)])
    assert count(service, RecentMetricsRow) == 0
    assert await steps_of(service, job_id) == list(range(1, last))


async def test_a_series_that_begins_is_in_a_chunk(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [loss(1)])
    service.report(job_id, 1, [loss(2)])
    service.report(job_id, 1, [metrics(3, {"loss": 0.3, "other": 1.0})])
    assert (count(service, MetricChunkRow), count(service, RecentMetricsRow)) == (2, 0)
    assert await steps_of(service, job_id) == [1, 2, 3]
    assert await steps_of(service, job_id, "other") == [3]


async def test_a_service_that_is_started_again_goes_on(service: Service) -> None:
    job_id = await service.running()
    for step in (1, 2, 3):
        service.report(job_id, 1, [loss(step), log(step - 1, f"line {step}")])
    forget(service)
    service.report(job_id, 1, [loss(3), loss(4), log(3, "line 4")])
    service.report(job_id, 1, [loss(5), log(4, "line 5")])
    assert await steps_of(service, job_id) == [1, 2, 3, 4, 5]
    assert await texts_of(service, job_id) == [f"line {n}" for n in range(1, 6)]
    assert await events_of(service, job_id, "metric_steps_repeated")


async def test_a_start_of_the_service_writes_no_chunk_again(service: Service) -> None:
    job_id = await service.running()
    for number in range(MAX_ROWS + 1):
        forget(service)
        service.report(job_id, 1, [loss(number + 1), log(number, f"line {number}")])
        in_rows, in_logs = number, number % MAX_CHUNKS + 1
        assert count(service, RecentMetricsRow) == in_rows
        assert count(service, LogChunkRow) == in_logs
    forget(service)
    service.report(job_id, 1, [loss(MAX_ROWS + 2)])
    assert count(service, RecentMetricsRow) == 0
    assert await steps_of(service, job_id) == list(range(1, MAX_ROWS + 3))
    assert await texts_of(service, job_id) == [f"line {n}" for n in range(MAX_ROWS + 1)]


async def test_the_last_reply_brings_points_and_lines_too(service: Service) -> None:
    job_id = await service.running()
    for step in (1, 2):
        service.report(job_id, 1, [loss(step), log(step - 1, f"line {step}")])
    service.end(job_id, 1, frames=[loss(3), log(2, "line 3")])
    assert count(service, RecentMetricsRow) == 0
    assert (count(service, MetricChunkRow), count(service, LogChunkRow)) == (1, 1)
    assert await steps_of(service, job_id) == [1, 2, 3]
    assert await texts_of(service, job_id) == ["line 1", "line 2", "line 3"]


async def test_points_of_an_attempt_that_resumed_replace_those_of_the_one_before(
    service: Service,
) -> None:
    job_id = await service.running()
    for step in range(1, 9):
        service.report(job_id, 1, [*([resumed(0)] if step == 1 else []), loss(step)])
    service.end(job_id, 1, Cause.NODE_LOST)
    assert service.claim(job_id, 1) is not None
    for step in range(6, 8):
        again = metrics(step, {"loss": float(step)})
        service.report(job_id, 2, [*([resumed(5)] if step == 6 else []), again])
        values = [*(1.0 / n for n in range(1, 6)), *map(float, range(6, step + 1))]
        found = await service.queries.metrics(job_id)
        assert found.series["loss"] == views.Series(steps=list(range(1, step + 1)), values=values)
    assert count(service, RecentMetricsRow) == 1


async def test_a_name_that_is_refused_keeps_no_other_out_of_the_rows(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_writer, "MAX_KEYS", 1)
    job_id = await service.running()
    for step in (1, 2, 3):
        service.report(job_id, 1, [metrics(step, {"loss": 1.0 / step, "too-many": 1.0})])
    assert (count(service, MetricChunkRow), count(service, RecentMetricsRow)) == (1, 2)
    assert await steps_of(service, job_id) == [1, 2, 3]
    assert await steps_of(service, job_id, "too-many") == []


async def test_what_is_known_does_not_outlive_a_transaction_that_failed(service: Service) -> None:
    job_id = await service.running()
    for step in (1, 2):
        service.report(job_id, 1, [loss(step), log(step - 1, f"line {step}")])
    frames = [loss(3), log(2, "line 3")]
    reply = service.reply(job_id, 1, frames)

    def fails(session: Any) -> None:
        raise RuntimeError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sqlalchemy.orm.Session.commit", fails)
        with pytest.raises(RuntimeError, match="the disk is full"):
            service.store(job_id, 1, reply)
    service.store(job_id, 1, reply)
    service.report(job_id, 1, [loss(4), log(3, "line 4")])
    assert await steps_of(service, job_id) == [1, 2, 3, 4]
    assert await texts_of(service, job_id) == [f"line {n}" for n in range(1, 5)]


async def test_what_another_process_stored_meanwhile_is_read(service: Service) -> None:
    job_id = await service.running()
    for step in (1, 2):
        service.report(job_id, 1, [loss(step), log(step - 1, f"line {step}")])
    own = service.known
    forget(service)
    service.report(job_id, 1, [loss(3), log(2, "line 3")])
    service.known = own
    service.report(job_id, 1, [loss(3), loss(4), log(3, "line 4")])
    assert await steps_of(service, job_id) == [1, 2, 3, 4]
    assert await texts_of(service, job_id) == [f"line {n}" for n in range(1, 5)]


async def test_open_chunks_of_a_log_are_joined(service: Service) -> None:
    job_id = await service.running()
    for number in range(MAX_CHUNKS):
        service.report(job_id, 1, [log(number, f"line {number}")])
    assert count(service, LogChunkRow) == MAX_CHUNKS
    service.report(job_id, 1, [log(MAX_CHUNKS, f"line {MAX_CHUNKS}")])
    assert count(service, LogChunkRow) == 1
    expected = [f"line {number}" for number in range(MAX_CHUNKS + 1)]
    assert await texts_of(service, job_id) == expected


async def test_open_chunks_of_a_log_are_read_by_one_statement(service: Service) -> None:
    job_id = await service.running()
    for number in range(MAX_CHUNKS):
        service.report(job_id, 1, [log(number, f"{number} of {r}", rank=r) for r in range(4)])
    statements: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        page = await service.queries.logs(job_id, limit=1000)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len(page.items) == 4 * MAX_CHUNKS
    assert sum("log_chunks.text" in statement for statement in statements) == 1


async def test_lost_lines_are_noted_between_open_chunks(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "line 0")])
    service.report(job_id, 1, [log(1, "line 1")])
    service.report(job_id, 1, [log(4, "line 4")])
    lost = "[dray] 2 lines were lost here: they were written faster than they could be fetched"
    assert await texts_of(service, job_id) == ["line 0", "line 1", lost, "line 4"]


async def test_after_the_end_all_is_in_chunks(service: Service) -> None:
    job_id = await service.running()
    for step in (1, 2, 3):
        service.report(job_id, 1, [loss(step), log(step - 1, f"line {step}")])
    service.end(job_id, 1)
    assert count(service, RecentMetricsRow) == 0
    assert (count(service, MetricChunkRow), count(service, LogChunkRow)) == (1, 1)
    assert await steps_of(service, job_id) == [1, 2, 3]
    assert await texts_of(service, job_id) == ["line 1", "line 2", "line 3"]


async def test_rows_are_deleted_with_their_job(service: Service) -> None:
    job_id = await service.running()
    for step in (1, 2):
        service.report(job_id, 1, [loss(step)])
    service.database.write_sync(lambda s: s.execute(Base.metadata.tables["jobs"].delete()))
    assert count(service, RecentMetricsRow) == 0


@ONE_SET
@pytest.mark.parametrize("seed", [0, soak(1), soak(2)])
async def test_what_is_known_changes_nothing_of_what_is_read(service: Service, seed: int) -> None:
    """Random replies read the same with the cache, without it, and if it is occasionally
    cleared."""
    jobs = [await service.running() for _ in range(3)]
    chance, step, lines = random.Random(seed), 0, [0, 0]
    for _ in range(2 * MAX_ROWS):
        frames = []
        for _ in range(chance.choice([0, 1, 1, 1, 5])):
            step = max(1, step + chance.choice([1, 1, 1, 1, 3, 0]))
            keys = chance.choice([("loss",), ("loss", "speed"), (f"late-{step // 40}",)])
            rank = chance.choice([0, 0, 1])
            frames.append(metrics(step, {key: chance.random() for key in keys}, rank=rank))
        for rank in (0, 1):
            if chance.random() < 0.7:
                number = lines[rank] + (chance.random() < 0.05)
                lines[rank] = number + 1
                frames.append(log(number, f"{rank}: {number}", rank=rank))
        for place, job_id in enumerate(jobs):
            if place == 1 or (place == 2 and chance.random() < 0.1):
                forget(service)
            service.report(job_id, 1, frames)
    read = [await _all_of(service, job_id) for job_id in jobs]
    assert read[0] == read[1] == read[2]
    for job_id in jobs:
        service.end(job_id, 1)
    assert [await _all_of(service, job_id) for job_id in jobs] == read


async def _all_of(service: Service, job_id: str) -> tuple[object, ...]:
    found = [
        await service.queries.metrics(
            job_id, MetricsFilter(rank=rank, after_step=after, max_points=points)
        )
        for rank in (0, 1)
        for after, points in ((-1, 100_000), (-1, 7), (40, 100_000))
    ]
    texts = await texts_of(service, job_id)
    return [one.series for one in found], texts, (await service.jobs.get(job_id)).summary


def test_what_was_stored_longest_ago_is_forgotten(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_attempts, "MAX_STREAMS", 5)
    known = KnownAttempts()
    for number in range(4):
        series = {("loss", rank): 1 for rank in range(2)}
        known.keep(f"job-{number}", 1, {"a": number}, KnownAttempt(last_steps=series))
    taken = [
        service.database.read_sync(
            partial(known.take, job_id=f"job-{n}", attempt=1, cursor={"a": n})
        )
        for n in range(4)
    ]
    left = [attempt.num_streams for attempt in taken]
    assert left == [0, 0, 2, 2]
