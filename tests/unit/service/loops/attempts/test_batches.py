"""Replies that arrive together share a transaction; if a reply can't be stored, only this reply
fails."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import Cause, Outcome, Phase
from ray_workers.shared.names import attempt_prefix
from service.domain.errors import DatabaseUnavailable, StorageUnavailable
from service.ingest import attempt_results
from service.ingest.attempt_results import Received, Recorded
from service.loops.attempts import reply_writer
from service.loops.attempts.reply_writer import ReplyWriter
from service.loops.shared import batches as batches_module
from service.loops.shared.batches import together_or_alone
from service.loops.shared.fencing import LoopDatabase
from service.storage import staged_files
from service.storage.storage import Storage
from tests.unit.service.helpers import Service, log, metrics


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the jobs in each transaction that stores replies; a transaction with the job `bad`
    fails."""
    seen: list[list[str]] = []
    record = attempt_results.record

    def recorded(
        session: Session,
        storage: object,
        received: Sequence[Received],
        *rest: object,
        **named: object,
    ) -> list[Recorded]:
        seen.append([one.job_id for one in received])
        answers = record(session, storage, received, *rest, **named)  # type: ignore[arg-type]
        if any("bad" in one.reply.phase_times for one in received):
            raise RuntimeError("a reply of one job spoils the transaction")
        return answers

    monkeypatch.setattr(attempt_results, "record", recorded)
    return seen


def writer(service: Service) -> ReplyWriter:
    return ReplyWriter(LoopDatabase(service.database), service.storage, service.prices)


def ended(service: Service, job_id: str) -> Received:
    outcome = Outcome.of(Cause.SUCCEEDED, "it ended")
    return Received(job_id, 1, service.reply(job_id, 1, phase=Phase.ENDED, outcome=outcome))


async def test_replies_of_many_jobs_are_stored_together(
    service: Service, batches: list[list[str]]
) -> None:
    jobs = [await service.running() for _ in range(4)]
    batches.clear()
    writing = writer(service)
    stored = await asyncio.gather(*(writing.store(ended(service, job_id)) for job_id in jobs))
    assert [one.live for one in stored] == [False] * 4
    assert batches == [jobs]
    for job_id in jobs:
        assert (await service.jobs.get(job_id)).state is JobState.SUCCEEDED
        events = (await service.queries.events(job_id)).items
        assert [event.seq for event in events] == [1, 2, 3, 4]


async def test_a_reply_that_fails_takes_no_other_along(
    service: Service, batches: list[list[str]]
) -> None:
    good, bad = await service.running(), await service.running()
    broken = ended(service, bad)
    broken.reply.phase_times["bad"] = 0.0  # type: ignore[index]
    writing = writer(service)
    answers = await asyncio.gather(
        *(writing.store(received) for received in (ended(service, good), broken)),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Recorded)
    assert isinstance(answers[1], RuntimeError)
    assert (await service.jobs.get(good)).state is JobState.SUCCEEDED
    assert (await service.jobs.get(bad)).state is JobState.RUNNING


async def test_a_job_whose_log_can_not_be_written_takes_no_other_along(
    service: Service, batches: list[list[str]]
) -> None:
    """A rank could have created a file at the path of its log folder."""
    good, bad = await service.running(), await service.running()
    service.storage.write_bytes(f"{attempt_prefix(bad, 1)}/logs", b"")
    spoilt = full_chunk(service, bad)
    batches.clear()
    writing = writer(service)
    stored = await asyncio.gather(*map(writing.store, (ended(service, good), spoilt)))
    assert [one.live for one in stored] == [False, True]
    assert batches == [[good, bad]] * 2, "once more after the file was refused"
    assert (await service.jobs.get(good)).state is JobState.SUCCEEDED


def full_chunk(service: Service, job_id: str) -> Received:
    lines = [log(number, "x" * 30_000) for number in range(3)]
    return Received(job_id, 1, service.reply(job_id, 1, lines))


async def test_a_slow_storage_does_not_hold_the_database(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await service.running()
    begun, may_end, write = threading.Event(), threading.Event(), service.storage.write_bytes

    def write_slowly(key: str, data: bytes) -> None:
        begun.set()
        assert may_end.wait(60)
        write(key, data)

    monkeypatch.setattr(service.storage, "write_bytes", write_slowly)
    storing = asyncio.create_task(writer(service).store(full_chunk(service, job_id)))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        await asyncio.wait_for(service.jobs.cancel(job_id), 10)
        assert (await service.queries.logs(job_id)).items == []
    finally:
        may_end.set()
    assert (await storing).live
    assert len((await service.queries.logs(job_id)).items) == 3


async def test_a_storage_that_stands_still_counts_as_unavailable(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, may_end = await service.running(), threading.Event()
    monkeypatch.setattr(staged_files, "LIMIT_S", 0.1)
    monkeypatch.setattr(service.storage, "write_bytes", lambda *_: may_end.wait(60))
    with pytest.raises(StorageUnavailable, match=r"was not written to the storage within 0\.1 s"):
        await writer(service).store(full_chunk(service, job_id))
    may_end.set()


async def test_a_transaction_that_always_needs_other_files_fails(storage: Storage) -> None:
    runs = itertools.count()

    async def write(files: staged_files.StagedFiles) -> None:
        files.write_bytes("logs/a", str(next(runs)).encode())
        files.check()

    with pytest.raises(StorageUnavailable, match="different files in each of its 10 runs"):
        await staged_files.with_files(storage, write)
    assert next(runs) == staged_files.MAX_RUNS


async def test_a_file_that_no_row_names_is_replaced(service: Service) -> None:
    job_id = await service.running()
    key = f"{attempt_prefix(job_id, 1)}/logs/rank-00000/000000000000.jsonl"
    service.storage.write_bytes(key, b"of a service that was killed before it stored the row")
    await writer(service).store(full_chunk(service, job_id))
    assert len((await service.queries.logs(job_id)).items) == 3


async def test_two_replies_of_a_job_are_stored_one_after_the_other(
    service: Service, batches: list[list[str]]
) -> None:
    job_id, other = await service.running(), await service.running()
    batches.clear()
    replies = [
        Received(job_id, 1, service.reply(job_id, 1, [metrics(1, {"train/loss": 0.5})])),
        ended(service, job_id),
        ended(service, other),
    ]
    writing = writer(service)
    stored = await asyncio.gather(*map(writing.store, replies))
    assert [one.live for one in stored] == [True, False, False]
    assert batches == [[job_id, other], [job_id]]


async def test_a_batch_is_bounded_by_its_jobs_and_by_its_frames(
    service: Service, batches: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_writer, "MAX_REPLIES", 2)
    monkeypatch.setattr(reply_writer, "MAX_FRAMES", 3)
    few = [await service.running() for _ in range(3)]
    large = await service.running()
    batches.clear()
    writing = writer(service)
    frames = [metrics(step, {"train/loss": 0.5}) for step in range(1, 5)]
    reply = service.reply(large, 1, frames)
    await asyncio.gather(
        *(writing.store(ended(service, job_id)) for job_id in few),
        writing.store(Received(large, 1, reply)),
    )
    assert sorted(map(len, batches)) == [1, 1, 2]
    assert [large] in batches


async def test_attempts_that_have_reported_share_smaller_batches(
    service: Service, batches: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_writer, "MAX_OF_REPORTING", 1)
    first, second, silent = [await service.running() for _ in range(3)]
    batches.clear()
    writing = writer(service)
    never_reported = replace(ended(service, silent).reply, cursor={})
    await asyncio.gather(
        writing.store(Received(silent, 1, never_reported)),
        *(writing.store(ended(service, job_id)) for job_id in (first, second)),
    )
    assert batches == [[silent, first], [second]]


async def test_a_database_that_does_not_answer_is_asked_once() -> None:
    asked: list[Sequence[int]] = []

    async def store(items: Sequence[int]) -> list[int]:
        asked.append(items)
        raise DatabaseUnavailable("the database does not respond")

    with pytest.raises(DatabaseUnavailable):
        await together_or_alone([1, 2, 3], store)
    assert asked == [[1, 2, 3]]


@pytest.mark.parametrize("alone_s", [0.0, 60.0])
async def test_a_storage_that_takes_long_to_fail_is_not_asked_for_each(
    monkeypatch: pytest.MonkeyPatch, alone_s: float
) -> None:
    monkeypatch.setattr(batches_module, "ALONE_S", alone_s)
    asked: list[Sequence[int]] = []

    async def store(items: Sequence[int]) -> list[int]:
        asked.append(items)
        raise StorageUnavailable("the storage does not answer")

    answers = await together_or_alone([1, 2, 3], store)
    assert [type(answer) for answer in answers] == [StorageUnavailable] * 3
    assert asked == ([[1, 2, 3], [1]] if alone_s == 0.0 else [[1, 2, 3], [1], [2], [3]])
