"""Logs: every line is served once and in order, regardless of where it is stored, within the job's
limit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from dray.views import LogLine
from ray_workers.shared.contracts import Cause, Outcome, Phase, PollReply
from service.db.models import LogChunkRow
from service.db.session import Database
from service.domain.errors import BadCursor, StorageUnavailable
from service.storage.storage import Storage
from service.telemetry import log_writer
from tests.unit.service.helpers import START, Service, log, two_ranks


async def read_all(
    service: Service, job_id: str, *, limit: int = 7, rank: int | None = None
) -> list[LogLine]:
    """Read all lines page by page, as a client would."""
    lines: list[LogLine] = []
    cursor = None
    while True:
        page = await service.queries.logs(job_id, cursor=cursor, limit=limit, rank=rank)
        lines += page.items
        cursor = page.next_cursor
        if not page.items:
            return lines


async def test_ranks_are_merged_by_time_and_each_keeps_its_order(service: Service) -> None:
    job_id = await service.running()
    times = {0: [0, 4, 2, 6], 1: [1, 3, 5, 7]}
    frames = [
        log(i, f"{rank}-{i}", rank=rank, at=START + timedelta(seconds=second))
        for rank, seconds in times.items()
        for i, second in enumerate(seconds)
    ]
    service.report(job_id, 1, frames)
    texts = [line.text for line in await read_all(service, job_id, limit=3)]
    assert [t for t in texts if t.startswith("0")] == ["0-0", "0-1", "0-2", "0-3"]
    assert texts == ["0-0", "1-0", "1-1", "0-1", "0-2", "1-2", "0-3", "1-3"]
    assert [line.text for line in await read_all(service, job_id, rank=1)] == [
        "1-0",
        "1-1",
        "1-2",
        "1-3",
    ]


async def test_a_line_that_arrives_late_comes_on_a_later_page(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "rank 0", at=START + timedelta(seconds=9))])
    first = await service.queries.logs(job_id)
    service.report(job_id, 1, [log(0, "rank 1, earlier", rank=1, at=START)])
    second = await service.queries.logs(job_id, cursor=first.next_cursor)
    assert [line.text for line in second.items] == ["rank 1, earlier"]


async def test_full_chunks_go_to_storage_and_read_the_same(service: Service) -> None:
    job_id = await service.running()
    texts = [f"{i:05d} " + "é" * 50 for i in range(3000)]
    for begin in range(0, 3000, 400):
        lines = [log(i, texts[i]) for i in range(begin, min(begin + 400, 3000))]
        service.report(job_id, 1, lines)
    assert [line.text for line in await read_all(service, job_id, limit=777)] == texts
    service.end(job_id, 1)
    rows = service.database.read_sync(
        lambda s: s.scalars(select(LogChunkRow).order_by(LogChunkRow.first_line)).all()
    )
    *closed, tail = rows
    assert len(closed) >= 3
    assert all(row.text is None and row.storage_key and row.size_bytes >= 65536 for row in closed)
    assert tail.storage_key is None
    assert tail.text
    for row in closed:
        assert len(service.storage.read_bytes(row.storage_key or "")) == row.size_bytes
    assert [line.text for line in await read_all(service, job_id, limit=777)] == texts


async def test_lines_of_attempts_come_one_after_the_other(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "one", at=START + timedelta(seconds=50))])
    service.end(job_id, 1, Cause.NODE_LOST)
    service.claim(job_id, 1)
    service.report(job_id, 2, [log(0, "two", at=START)])
    lines = await read_all(service, job_id)
    assert [(line.attempt, line.text) for line in lines] == [(1, "one"), (2, "two")]
    page = await service.queries.logs(job_id, attempt=2)
    assert [line.text for line in page.items] == ["two"]


async def test_lines_of_a_process_started_again_go_on_after_the_ones_before(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "a"), log(1, "b")])
    service.report(job_id, 1, [log(0, "c", incarnation=1), log(1, "d", incarnation=1)])
    assert [line.text for line in await read_all(service, job_id)] == ["a", "b", "c", "d"]


async def test_lines_that_were_lost_on_the_way_leave_a_note(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "a"), log(5, "f")])
    service.report(job_id, 1, [log(6, "g"), log(9, "j")])
    texts = [line.text for line in await read_all(service, job_id)]
    assert texts[0] == "a"
    assert "4 lines were lost here" in texts[1]
    assert texts[2:4] == ["f", "g"]
    assert "2 lines were lost here" in texts[4]


async def test_the_end_is_told_only_when_the_job_is_over_and_all_was_read(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(i, str(i)) for i in range(4)])
    assert not (await service.queries.logs(job_id, limit=100)).complete
    service.end(job_id, 1, frames=[log(4, "bye")])
    first = await service.queries.logs(job_id, limit=3)
    assert not first.complete
    rest = await service.queries.logs(job_id, limit=3, cursor=first.next_cursor)
    assert [line.text for line in rest.items] == ["3", "bye"]
    assert rest.complete


async def test_beyond_the_limit_the_newest_lines_stay_and_the_others_are_counted(
    database: Database, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "TAIL_BYTES", 1000)
    service = Service(database, storage, tmp_path, log_limit_bytes=1024)
    job_id = await service.running()
    for begin in range(0, 300, 30):
        service.report(job_id, 1, [log(i, f"{i:099d}") for i in range(begin, begin + 30)])
        read = [line.text for line in await read_all(service, job_id)]
        numbers = [int(text) for text in read if not text.startswith("[dray]")]
        assert numbers[:10] == list(range(10)), "the head"
        newest = numbers[10:]
        assert newest == list(range(begin + 30 - len(newest), begin + 30)), "the tail"
        left_out = begin + 30 - len(numbers)
        assert f"{left_out} lines are omitted here" in read[10]
    assert 5 < len(newest) < 10
    service.report(job_id, 1, [log(0, "z", rank=1)])
    assert [line.text for line in await read_all(service, job_id, rank=1)][1:] == ["z"]
    service.end(job_id, 1)
    events = (await service.queries.events(job_id)).items
    assert [event.type for event in events].count("log_limit") == 1
    assert events[-1].data["log_lines_dropped"] == left_out


async def test_a_line_that_exceeds_the_limit_is_the_first_of_the_tail(
    database: Database, storage: Storage, tmp_path: Path
) -> None:
    service = Service(database, storage, tmp_path, log_limit_bytes=1024)
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "a"), log(1, "b" * 2000), log(2, "c")])
    service.end(job_id, 1, frames=[log(3, "bye")])
    texts = [line.text for line in await read_all(service, job_id)]
    assert texts[0] == "a"
    assert "0 lines are omitted here" in texts[1]
    assert texts[2:] == ["b" * 2000, "c", "bye"]


async def test_lines_that_were_lost_and_then_left_out_are_counted_once(
    database: Database, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "TAIL_BYTES", 1000)
    service = Service(database, storage, tmp_path, log_limit_bytes=1024)
    job_id = await service.running()
    service.report(job_id, 1, [log(i, "x" * 99) for i in range(20)])
    service.report(job_id, 1, [log(i, "y" * 99) for i in range(120, 140)])
    texts = [line.text for line in await read_all(service, job_id)]
    kept = sum(not text.startswith("[dray]") for text in texts)
    assert f"{140 - kept} lines are omitted here" in texts[10]
    service.end(job_id, 1)
    last = (await service.queries.events(job_id)).items[-1]
    assert last.data["log_lines_dropped"] == 140 - kept


async def test_who_follows_a_log_beyond_its_limit_reads_on_where_it_was(
    database: Database, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "TAIL_BYTES", 1000)
    service = Service(database, storage, tmp_path, log_limit_bytes=1024)
    job_id = await service.running()
    read, cursor = [], None
    for begin in range(0, 60, 3):
        service.report(job_id, 1, [log(i, f"{i:099d}") for i in range(begin, begin + 3)])
        page = await service.queries.logs(job_id, cursor=cursor)
        read += [line.text for line in page.items if not line.text.startswith("[dray]")]
        cursor = page.next_cursor
    assert [int(text) for text in read] == list(range(60))


async def test_what_an_attempt_could_not_keep_is_said_at_the_end_of_each_log(
    service: Service,
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(0, "a"), log(0, "b", rank=1)])
    outcome = replace(Outcome.of(Cause.SUCCEEDED, "done"), log_lines_lost={0: 333, 1: None})
    service.store(job_id, 1, service.reply(job_id, 1, phase=Phase.ENDED, outcome=outcome))
    zero, one = [await read_all(service, job_id, rank=rank) for rank in (0, 1)]
    assert "333 lines were lost here" in zero[-1].text
    assert "may be missing" in one[-1].text
    last = (await service.queries.events(job_id)).items[-1]
    assert last.data["log_lines_dropped"] == 333


@pytest.mark.parametrize("cause", [Cause.SUPERVISOR_LOST, Cause.NODE_LOST])
async def test_where_no_supervisor_is_left_each_log_says_that_its_last_lines_may_be_missing(
    service: Service, cause: Cause
) -> None:
    job_id = await two_ranks(service)
    service.report(job_id, 1, [log(0, "a", rank=1), log(0, "b", rank=5)])
    outcome = Outcome.unseen(cause, "the supervisor is gone")
    service.store(job_id, 1, service.reply(job_id, 1, phase=Phase.ENDED, outcome=outcome))
    for rank in (0, 1, 5):
        last = (await read_all(service, job_id, rank=rank))[-1]
        assert "lines of this log may be missing" in last.text
    assert {line.rank for line in await read_all(service, job_id)} == {0, 1, 5}


async def test_the_log_of_a_silo_that_stays_on_its_node_lacks_no_lines(service: Service) -> None:
    silos = [{"name": name, "node_labels": {"at": name}} for name in ("north", "south")]
    job_id = await service.running(federated={"rounds": 2, "silos": silos})
    service.report(job_id, 1, [log(0, "of an open silo", rank=2)])
    outcome = Outcome.unseen(Cause.SUPERVISOR_LOST, "the supervisor is gone")
    service.store(job_id, 1, service.reply(job_id, 1, phase=Phase.ENDED, outcome=outcome))
    lines = [(line.rank, line.text) for line in await read_all(service, job_id)]
    assert {rank for rank, _ in lines} == {0, 2}
    assert all("may be missing" in text for _, text in lines if text != "of an open silo")


async def test_an_attempt_that_never_had_a_process_lost_no_lines(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    gone = PollReply(
        cursor={},
        phase=Phase.ENDED,
        phase_times={},
        frames=(),
        more=False,
        outcome=Outcome.unseen(Cause.SUPERVISOR_LOST, "there is no such actor"),
        silent=(),
    )
    service.store(job_id, 1, gone)
    assert await read_all(service, job_id) == []


async def test_a_cursor_of_another_jobs_logs_is_refused(service: Service) -> None:
    job_id, other = await service.running(), await service.running()
    cursor = (await service.queries.logs(other)).next_cursor
    for bad in (cursor, "nonsense", ""):
        with pytest.raises(BadCursor):
            await service.queries.logs(job_id, cursor=bad)


async def test_a_storage_that_is_not_mounted_is_not_a_log_that_is_missing(service: Service) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [log(i, "x" * 1000) for i in range(100)])
    service.storage.delete_tree("jobs")
    with pytest.raises(StorageUnavailable, match="missing"):
        await service.queries.logs(job_id)


async def test_a_log_without_lines_is_an_empty_page(service: Service) -> None:
    job_id = await service.submit()
    page = await service.queries.logs(job_id)
    assert (page.items, page.complete) == ([], False)
    await service.jobs.cancel(job_id)
    assert (await service.queries.logs(job_id, cursor=page.next_cursor)).complete
