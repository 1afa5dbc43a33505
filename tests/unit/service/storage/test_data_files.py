"""Uploaded files: their lines, their owners, and what interrupted uploads leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dray.spec import Data, JobSpec
from ray_workers.datasets.sources.node_cache import NodeCache
from ray_workers.datasets.sources.source import Source
from ray_workers.shared.names import UPLOADS_FOLDER
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.submission import data_files as repository
from service.db.session import Database
from service.domain.errors import (
    BadUpload,
    Conflict,
    FileNotFound,
    InvalidDocument,
    NotFound,
    StorageUnavailable,
)
from service.jobs.data_policy import sources_of
from service.jobs.tuning_requests import TuningRequests
from service.storage import data_files
from service.storage.data_files import DataFiles, count_examples, key_of
from service.storage.storage import Storage
from tests.unit.service.helpers import START, Service

GOOD = b'{"text": "a"}\n\n{"text": "b"}'


class Clock:
    now = START

    def __call__(self) -> object:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(database: Database, storage: Storage, clock: Clock) -> DataFiles:
    return DataFiles(database, storage, clock=clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(100))
def test_lines_are_counted_as_a_plain_loop_counts_them(seed: int) -> None:
    draw = random.Random(seed)
    kinds = ['{"a": "ü"}', "", "  ", "[1]", "{", '{"a": NaN}', "7", '{"a": "\\u2028"}']
    weights = [20, 2, 1, *[draw.choice([0, 1]) for _ in kinds[3:]]]
    lines = draw.choices(kinds, weights, k=draw.randint(0, 12))
    content = draw.choice(["\n", "\r\n"]).join(lines).encode()
    bad = None
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip() and bad is None:
            try:
                bad = None if isinstance(json.loads(line), dict) else number
            except ValueError:
                bad = number
    num = sum(bool(line.strip()) for line in content.split(b"\n"))
    if bad is not None or not num:
        with pytest.raises(BadUpload, match="no examples" if bad is None else rf"^line {bad} "):
            count_examples(content)
    else:
        assert count_examples(content) == num


def test_the_first_broken_line_is_named() -> None:
    lines = [b'{"a": 1}'] * 16 + [b'{"a": 1', b"["]
    with pytest.raises(BadUpload, match=r"^line 17 of the file is not JSON"):
        count_examples(b"\n".join(lines))
    with pytest.raises(BadUpload, match="line 1 of the file is not UTF-8"):
        count_examples(b'{"a": "\xff"}')
    assert count_examples(b'\xef\xbb\xbf{"a": 1}') == 1


def test_a_long_line_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_LINE_BYTES", 100)
    assert count_examples(b'{"a": 1}\n' * 100) == 100
    for line in (b'{"a": [%s0]}' % (b"0," * 100), b"[" * 101, b" " * 101):
        with pytest.raises(BadUpload, match="line 2 of the file has more than 100 bytes"):
            count_examples(b'{"a": 1}\n' + line)


async def test_a_file_belongs_to_its_owner(files: DataFiles, storage: Storage) -> None:
    row = await files.upload("ann", "x.jsonl", GOOD)
    assert (await files.get("ann", row.id)).num_lines == 2
    assert storage.read_bytes(key_of(row.id)) == GOOD
    for owner, file_id in (("bob", row.id), ("ann", "file-none"), ("ann", "\0")):
        with pytest.raises(FileNotFound):
            await files.get(owner, file_id)
        with pytest.raises(FileNotFound):
            await files.delete(owner, file_id)
    await files.delete("ann", row.id)
    with pytest.raises(FileNotFound):
        await files.get("ann", row.id)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(key_of(row.id))


async def test_transactions_can_be_repeated_after_a_lost_answer(
    files: DataFiles, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = database.write

    async def twice(work: Any) -> Any:
        await once(work)
        return await once(work)

    monkeypatch.setattr(database, "write", twice)
    row = await files.upload("ann", "x.jsonl", GOOD)
    assert [one.id for one in await files.page("ann", None, 9)] == [row.id]
    await files.delete("ann", row.id)
    assert await files.page("ann", None, 9) == []


async def test_what_an_interrupted_upload_leaves_is_removed(
    files: DataFiles,
    database: Database,
    storage: Storage,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_bytes", fails)
        with pytest.raises(StorageUnavailable):
            await files.upload("ann", "x.jsonl", GOOD)
    assert await files.page("ann", None, 10) == []
    kept = await files.upload("ann", "y.jsonl", GOOD)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "delete_tree", fails)
        await files.delete("ann", kept.id)
    later = START + timedelta(hours=2)
    assert len(database.read_sync(lambda s: repository.left(s, later, 10))) == 2
    clock.now = later
    await files.upload("ann", "z.jsonl", GOOD)
    assert database.read_sync(lambda s: repository.left(s, later + timedelta(days=1), 10)) == []
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(key_of(kept.id))


async def test_a_document_may_name_only_files_of_its_owner(
    files: DataFiles, database: Database
) -> None:
    first, second = [(await files.upload("ann", "x.jsonl", GOOD)).id for _ in range(2)]
    for source in (f"upload://{first}", f"upload://{first}?validation={second}"):
        data = tuning(source).data
        assert data.known_format == "jsonl"
        named = list(sources_of(data))
        database.write_sync(lambda s, named=named: data_files.use(s, named, "ann", START))  # type: ignore[misc]
        with pytest.raises(InvalidDocument, match="does not exist") as refused:
            database.write_sync(lambda s, named=named: data_files.use(s, named, "bob", START))  # type: ignore[misc]
        assert refused.value.pointer == "/data/source"


async def test_a_file_is_kept_while_a_job_reads_it(service: Service) -> None:
    files = service.jobs.files
    first, second, free = [(await files.upload("ann", "x.jsonl", GOOD)).id for _ in range(3)]
    source = f"upload://{first}?validation={second}"
    submitted = await service.jobs.submit(tuning(source), owner="ann")
    job_id = submitted[0].id
    for file_id in (first, second):
        with pytest.raises(Conflict, match=job_id):
            await files.delete("ann", file_id)
    await files.delete("ann", free)
    with pytest.raises(InvalidDocument, match=f"{free}, which does not exist"):
        await service.jobs.submit(tuning(f"upload://{free}"), owner="ann")
    with pytest.raises(InvalidDocument, match=f"{first}, which does not exist"):
        await service.jobs.submit(tuning(source), owner="bob")
    await service.jobs.cancel(job_id, actor="ann")
    await files.delete("ann", first)


@pytest.mark.parametrize("seed", range(3))
async def test_a_job_and_a_deletion_at_once_leave_no_job_without_its_file(
    service: Service, seed: int
) -> None:
    files = service.jobs.files
    file_id = (await files.upload("ann", "x.jsonl", GOOD)).id
    calls = [
        service.jobs.submit(tuning(f"upload://{file_id}"), owner="ann"),
        files.delete("ann", file_id),
    ]
    order = calls if seed % 2 else calls[::-1]
    ended = await asyncio.gather(*order, return_exceptions=True)
    refused = [one for one in ended if isinstance(one, Exception)]
    assert len(refused) == 1
    assert isinstance(refused[0], Conflict | InvalidDocument)


async def test_tuning_requests_are_listed_with_few_queries(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = TuningRequests(service.database, service.jobs)
    for _ in range(5):
        await tuned.create(tuning("file:///d.jsonl"), {"model": "m"}, [], "ann", "ann")
    looked_up: list[int] = []
    labels = jobs_repository.labels

    def counted(session: Session, job_ids: Sequence[str]) -> Any:
        looked_up.append(len(job_ids))
        return labels(session, job_ids)

    monkeypatch.setattr(jobs_repository, "labels", counted)
    assert len(await tuned.page("ann", None, 9)) == 5
    assert looked_up == [5]


async def test_tuning_requests_are_listed_newest_first(service: Service) -> None:
    tuned = TuningRequests(service.database, service.jobs)
    ids = []
    for number in range(5):
        owner = "bob" if number == 2 else "ann"
        service.advance(1)
        made = await tuned.create(
            tuning("file:///d.jsonl"), {"model": str(number)}, ["a note"], owner, owner
        )
        ids.append(made.job.id)
    page = await tuned.page("ann", None, 2)
    assert [one.job.id for one in page] == [ids[4], ids[3]]
    assert [one.request["model"] for one in await tuned.page("ann", ids[3], 9)] == ["1", "0"]
    assert await tuned.succeeded("ann", 9) == []
    events = (await service.queries.events(ids[0])).items
    assert [one.message for one in events if one.type == "openai"] == ["a note"]
    plain = await service.jobs.submit(tuning("file:///d.jsonl"), owner="ann")
    with pytest.raises(NotFound):
        await tuned.get(plain[0].id)
    await service.jobs.cancel(ids[4], actor="ann")
    await service.jobs.delete(ids[4])
    assert [one.job.id for one in await tuned.page("ann", None, 1)] == [ids[3]]


@pytest.mark.parametrize("seed", range(6))
async def test_expired_files_are_invisible_and_deleted_unless_a_job_reads_them(
    service: Service, seed: int
) -> None:
    """Compared with a plain list of the files, in random orders of uploads, jobs and sweeps."""
    draw = random.Random(seed)
    files, storage = service.jobs.files, service.storage
    expires: dict[str, timedelta | None] = {}
    live: dict[str, str] = {}
    swept: set[str] = set()
    began = service.now

    def lasts(file_id: str) -> bool:
        end = expires[file_id]
        return end is None or service.now < began + end

    for _ in range(25):
        service.advance(draw.choice([1, 600, 1800]))
        step = draw.choice(["upload", "upload", "submit", "cancel", "sweep"])
        if step == "upload":
            hours = draw.choice([None, timedelta(hours=1), timedelta(hours=2)])
            row = await files.upload("ann", "x.jsonl", GOOD, lasts=hours)
            expires[row.id] = None if hours is None else service.now - began + hours
            assert row.expires_at == (None if hours is None else service.now + hours)
        elif step == "submit" and expires:
            file_id = draw.choice(sorted(expires))
            job = tuning(f"upload://{file_id}")
            if lasts(file_id):
                live[(await service.jobs.submit(job, owner="ann"))[0].id] = file_id
            else:
                with pytest.raises(InvalidDocument, match="does not exist"):
                    await service.jobs.submit(job, owner="ann")
        elif step == "cancel" and live:
            job_id = draw.choice(sorted(live))
            await service.jobs.cancel(job_id, actor="ann")
            del live[job_id]
        elif step == "sweep":
            await files.remove_expired()
            swept |= {f for f in expires if not lasts(f) and f not in live.values()}
        seen = {row.id for row in await files.page("ann", None, 99)}
        assert seen == {file_id for file_id in expires if lasts(file_id)}
        for file_id in expires:
            assert is_stored(storage, file_id) == (file_id not in swept), (step, file_id)
            if not lasts(file_id):
                with pytest.raises(FileNotFound):
                    await files.get("ann", file_id)
                with pytest.raises(FileNotFound):
                    await files.delete("ann", file_id)


async def test_expired_files_that_jobs_read_do_not_hide_others_from_the_sweep(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "LEFT_AT_ONCE", 2)
    files, hour = service.jobs.files, timedelta(hours=1)
    read = [(await files.upload("ann", "x.jsonl", GOOD, lasts=hour)).id for _ in range(4)]
    for file_id in read:
        await service.jobs.submit(tuning(f"upload://{file_id}"), owner="ann")
    free = (await files.upload("ann", "x.jsonl", GOOD, lasts=hour)).id
    service.advance(3600)
    await files.remove_expired()
    kept = [one for one in (*read, free) if is_stored(service.storage, one)]
    assert kept == read


async def test_a_storage_that_fails_does_not_stop_the_sweep(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = service.jobs.files
    file_id = (await files.upload("ann", "x.jsonl", GOOD, lasts=timedelta(hours=1))).id
    service.advance(3600)
    with monkeypatch.context() as patched:
        patched.setattr(service.storage, "delete_tree", fails)
        await files.remove_expired()
    assert is_stored(service.storage, file_id)
    service.advance(2 * 3600)
    await files.remove_left()
    assert not is_stored(service.storage, file_id)


def is_stored(storage: Storage, file_id: str) -> bool:
    try:
        return storage.read_bytes(key_of(file_id)) == GOOD
    except FileNotFoundError:
        return False


def fails(*_: object) -> None:
    raise StorageUnavailable("the disk is gone")


def test_the_source_that_names_a_missing_file_is_named(database: Database) -> None:
    gone = f"upload://file-{'0' * 26}"
    good = {"source": "file:///a.jsonl"}
    for data, pointer in (
        ({"source": gone}, "/data/source"),
        ({**good, "validation": gone}, "/data/validation"),
        ({"sources": [good, {"source": gone}], "validation": "file:///v.jsonl"}, SECOND),
    ):
        model = {"base": "file:///m"}
        spec = JobSpec.model_validate({"recipe": "fine_tuning", "model": model, "data": data})
        named = list(sources_of(spec.data))
        with pytest.raises(InvalidDocument, match="does not exist") as refused:
            database.write_sync(lambda s, named=named: data_files.use(s, named, "ann", START))  # type: ignore[misc]
        assert refused.value.pointer == pointer


SECOND = "/data/sources/1/source"


def tuning(source: str) -> JobSpec:
    model = {"base": "file:///m"}
    return JobSpec.model_validate(
        {"recipe": "fine_tuning", "model": model, "data": {"source": source}}
    )


@pytest.mark.parametrize("url", ["upload://x", "upload://file-1", "upload://", "upload:///etc"])
def test_what_is_no_file_id_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be upload://FILE_ID"):
        Data(source=url)


async def test_nodes_read_uploaded_files(
    files: DataFiles, storage: Storage, tmp_path: Path
) -> None:
    first = (await files.upload("ann", "x.jsonl", GOOD)).id
    second = (await files.upload("ann", "y.jsonl", GOOD[:13])).id
    policy = DataPolicy(
        **{
            **vars(DataPolicy.open(str(tmp_path / "cache"))),
            "file_roots": (),
            "uploads_url": f"{storage.url}/{UPLOADS_FOLDER}",
        }
    )

    def read(url: str) -> dict[str, bytes]:
        cache = NodeCache.of(policy)
        source = Source(url, policy, cache, None, (".jsonl",))
        with cache.lock(url):
            content = source.identify(size_bytes=None, sha256=None)
            assert content.is_folder == ("?" in url)
            found = {file.name: file.path.read_bytes() for file in source.files(content)}
            source.release()
        return found

    assert read(f"upload://{first}") == {"train.jsonl": GOOD}
    both = read(f"upload://{first}?validation={second}")
    assert both == {"train.jsonl": GOOD, "validation.jsonl": GOOD[:13]}
    await files.delete("ann", second)
    with pytest.raises(DataError, match="was deleted"):
        read(f"upload://{first}?validation={second}")
