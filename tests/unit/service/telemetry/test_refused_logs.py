"""Logs of jobs that have damaged their own folders: read, limited, and stored later."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from ray_workers.shared.names import attempt_prefix
from service.db.models import LogChunkRow
from service.domain.errors import FolderSpoilt, StorageUnavailable
from service.loops.retention import Retention
from service.loops.shared.timings import LoopTimings
from service.storage import storage as storage_module
from service.storage.storage import Storage
from service.telemetry import refused_logs
from tests.unit.service.helpers import Service, events_of, log
from tests.unit.service.telemetry.test_logs import read_all

LONG = "x" * 30_000
"""Three such lines fill a chunk."""


def folder_of(service: Service, job_id: str) -> Path:
    path = service.storage.local_path(f"{attempt_prefix(job_id, 1)}/logs")
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def chunks(service: Service) -> list[LogChunkRow]:
    return service.database.read_sync(
        lambda s: list(s.scalars(select(LogChunkRow).order_by(LogChunkRow.first_line)))
    )


def retention(service: Service) -> Retention:
    return Retention(
        *(service.database, service.storage, service.jobs.storage_watch, service.jobs),
        *(service.settings, LoopTimings(expiry_period_s=0.0)),
        clock=lambda: service.now,
    )


def a_file(logs: Path) -> None:
    logs.touch()


def a_file_for_the_rank(logs: Path) -> None:
    logs.mkdir()
    (logs / "rank-00000").touch()


def a_folder_for_the_chunk(logs: Path) -> None:
    (logs / "rank-00000" / "000000000000.jsonl" / "x").mkdir(parents=True)


def a_link_to_itself(logs: Path) -> None:
    logs.symlink_to(logs)


def a_link_to_another_job(logs: Path) -> None:
    (logs.parents[3] / "job-other" / "logs").mkdir(parents=True)
    logs.symlink_to(logs.parents[3] / "job-other" / "logs")


SPOILERS = [
    *(a_file, a_file_for_the_rank, a_folder_for_the_chunk, a_link_to_itself, a_link_to_another_job)
]


@pytest.mark.parametrize("spoil", SPOILERS)
async def test_a_refused_log_reads_the_same_and_is_stored_later(
    sqlite_service: Service, spoil: Callable[[Path], None]
) -> None:
    service = sqlite_service
    job_id = await service.running()
    logs = folder_of(service, job_id)
    spoil(logs)
    texts = [f"{number} {LONG}" for number in range(8)]
    for number, text in enumerate(texts):
        service.report(job_id, 1, [log(number, text)])
    assert [line.text for line in await read_all(service, job_id, limit=2)] == texts
    (event,) = await events_of(service, job_id, refused_logs.REFUSED)
    assert "can't be written" in event.message
    await retention(service).run_once()
    assert any(chunk.refused_at is not None for chunk in chunks(service))
    service.end(job_id, 1)
    assert (await service.jobs.get(job_id)).state is JobState.SUCCEEDED
    assert not list((logs.parents[3] / "job-other").rglob("*.jsonl"))

    way = [logs, logs / "rank-00000", logs / "rank-00000" / "000000000000.jsonl"]
    in_the_way = next(path for path in way if path.is_symlink() or path.is_file() or path is way[2])
    storage_module._delete(in_the_way)
    await retention(service).run_once()
    *closed, _ = chunks(service)
    assert [chunk.storage_key is not None and chunk.text is None for chunk in closed] == [True] * 2
    assert all(chunk.refused_at is None for chunk in closed)
    assert [line.text for line in await read_all(service, job_id, limit=2)] == texts


async def test_the_oldest_refused_lines_are_dropped_and_their_bytes_are_told(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_logs, "MAX_BYTES", 200_000)
    job_id = await service.running()
    a_file(folder_of(service, job_id))
    for number in range(0, 24, 3):
        lines = [log(n, f"{n} {LONG}", rank=number % 2) for n in range(number, number + 3)]
        service.advance(1.0)
        service.report(job_id, 1, lines)
    kept = [chunk for chunk in chunks(service) if chunk.dropped_bytes is None]
    assert sum(chunk.size_bytes for chunk in kept) <= 200_000
    assert len(chunks(service)) == len(kept) + 2, "one note for each rank"
    for rank in (0, 1):
        note, *rest = [line.text for line in await read_all(service, job_id, limit=1, rank=rank)]
        (row,) = [c for c in chunks(service) if c.dropped_bytes is not None and c.rank == rank]
        assert f"{row.dropped_bytes} bytes of this log were dropped here" in note
        numbers = [int(text.split()[0]) for text in rest if not text.startswith("[dray]")]
        assert numbers == sorted(numbers)
        assert numbers[-1] == 20 + rank * 3
    service.end(job_id, 1)
    (event,) = await events_of(service, job_id, refused_logs.DROPPED)
    dropped = {str(c.rank): c.dropped_bytes for c in chunks(service) if c.dropped_bytes is not None}
    assert event.data["bytes"] == dropped
    assert f"{dropped['0']} bytes of rank 0" in event.message
    assert (await service.queries.events(job_id)).items[-1].data["log_lines_dropped"] >= 18


async def test_a_storage_that_is_full_is_waited_for_but_not_by_a_cancelled_job(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage_module, "_write_atomically", fail)
    job_id = await service.running()
    before = service.cursor(job_id, 1)
    lines = [log(number, f"{number} {LONG}") for number in range(4)]
    with pytest.raises(StorageUnavailable, match="No space"):
        service.report(job_id, 1, lines)
    assert service.cursor(job_id, 1) == before
    await service.jobs.cancel(job_id)
    service.end(job_id, 1, Cause.STOPPED, frames=lines)
    assert (await service.jobs.get(job_id)).state is JobState.CANCELLED
    monkeypatch.undo()
    await retention(service).run_once()
    assert all(chunk.refused_at is None for chunk in chunks(service))
    read = [line.text for line in await read_all(service, job_id)]
    assert read == [f"{number} {LONG}" for number in range(4)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES])
def test_a_storage_that_takes_no_file_of_anybody_is_not_a_folder_that_is_spoilt(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(storage_module, "_write_atomically", fail)
    (storage.folder or Path()).joinpath("jobs").mkdir()
    with pytest.raises(StorageUnavailable) as refusal:
        storage.write_bytes("jobs/a/log", b"")
    assert isinstance(refusal.value, FolderSpoilt) == (code == errno.EACCES)
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(StorageUnavailable) as refusal:
        storage.write_bytes("jobs/a/log", b"")
    assert not isinstance(refusal.value, FolderSpoilt)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")


def other_json(file: Path) -> None:
    file.write_text('["yesterday", 5]\n' * 3)


def deep_json(file: Path) -> None:
    file.write_text("[" * 50_000 + "\n")


def nothing(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("spoil", [a_pipe, garbage, other_json, deep_json, nothing])
async def test_a_chunk_that_was_spoilt_in_the_storage_is_a_line_and_the_others_are_read(
    sqlite_service: Service, spoil: Callable[[Path], None]
) -> None:
    service = sqlite_service
    job_id = await service.running()
    service.report(job_id, 1, [log(number, f"{number} {LONG}") for number in range(7)])
    spoil(folder_of(service, job_id) / "rank-00000" / "000000000000.jsonl")
    service.end(job_id, 1)
    read = [line.text for line in await read_all(service, job_id, limit=2)]
    assert "3 lines are missing here" in read[0]
    assert [text.split()[0] for text in read[1:]] == ["3", "4", "5", "6"]
