"""Uploaded code: storage, access by owners, and deletion."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from dray.code.manifest import PART_BYTES, FileEntry
from dray.spec import JobSpec
from service.code import models
from service.code.entrypoints import LARGEST_PARSED_BYTES
from service.code.uploads import KEPT
from service.db.models import Base, JobRow
from service.db.session import Database
from service.domain.errors import BadUpload, CodeUnfit, StorageUnavailable, UploadTooLarge
from service.storage.storage import Storage
from tests.marks import ON_SQLITE
from tests.unit.service.helpers import Service

PROGRAM = b"print('hello')\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(path: str, data: bytes = PROGRAM, *, executable: bool = False) -> FileEntry:
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    return FileEntry(path, len(data), executable, tuple(map(sha, parts)))


async def upload(service: Service, owner: str = "ann", **files: bytes) -> str:
    """Upload code with these files (in their names, `_` stands for a dot), and return its id."""
    named = {name.replace("_", "."): data for name, data in files.items()}
    entries = [entry(name, data) for name, data in named.items()]
    code = await service.jobs.code.describe(entries, owner)
    if code.missing:
        parts = {sha(data): data for data in named.values() if sha(data) in code.missing}
        await service.jobs.code.put_parts(parts, owner)
        code = await service.jobs.code.describe(entries, owner)
    assert code.is_complete
    return code.id


def rows(service: Service) -> dict[str, int]:
    names = ("code", "code_packs", "code_parts", "code_uses")
    tables = Base.metadata.tables
    return service.database.read_sync(
        lambda s: {n: s.scalar(select(func.count()).select_from(tables[n])) or 0 for n in names}
    )


def objects(service: Service) -> list[Path]:
    assert service.storage.folder is not None
    return [path for path in (service.storage.folder / "code").rglob("*") if path.is_file()]


async def contents(service: Service, code: str, owner: str = "ann") -> dict[str, bytes]:
    files = await service.jobs.code.files(owner, code)
    return {
        file.path: b"".join([piece async for piece in service.jobs.code.pieces(file)])
        for file in files
    }


async def test_only_what_is_missing_is_asked_for_and_all_of_it_comes_back(service: Service) -> None:
    big = bytes(PART_BYTES) + b"tail"
    first = await upload(service, train_py=PROGRAM, empty_txt=b"")
    again = await service.jobs.code.describe([entry("train.py"), entry("big", big)], "ann")
    assert again.missing == sorted({sha(bytes(PART_BYTES)), sha(b"tail")})
    # Half of the parts are received, and the upload resumes from there.
    await service.jobs.code.put_parts({sha(b"tail"): b"tail"}, "ann")
    again = await service.jobs.code.describe([entry("train.py"), entry("big", big)], "ann")
    assert again.missing == [sha(bytes(PART_BYTES))]
    await service.jobs.code.put_parts({sha(bytes(PART_BYTES)): bytes(PART_BYTES)}, "ann")
    code = await service.jobs.code.describe([entry("train.py"), entry("big", big)], "ann")
    assert code.is_complete
    assert await contents(service, code.id) == {"train.py": PROGRAM, "big": big}
    assert await contents(service, first) == {"train.py": PROGRAM, "empty.txt": b""}
    assert first == await upload(service, empty_txt=b"", train_py=PROGRAM)


async def test_a_hash_is_no_key_to_another_users_file(service: Service) -> None:
    code = await upload(service, train_py=PROGRAM)
    bobs = await service.jobs.code.describe([entry("train.py")], "bob")
    assert (bobs.is_complete, bobs.missing, bobs.id) == (False, [sha(PROGRAM)], code)
    with pytest.raises(CodeUnfit, match="no code"):
        await _submit(service, "bob", code=code, entrypoint="train.py")


async def _submit(service: Service, owner: str = "ann", **script: Any) -> str:
    from tests.unit.service.helpers import spec

    document = spec(recipe=None, script=script)
    job, _ = await service.jobs.submit(document, owner=owner)
    return job.id


@pytest.mark.parametrize(
    "files",
    [
        [entry("../a.py")],
        [entry("/etc/passwd")],
        [entry("a"), entry("a/b")],
        [entry("a"), entry("a")],
        [FileEntry("a", 10, False, ())],
        [FileEntry("a", 0, False, (sha(PROGRAM),))],
        [],
    ],
)
async def test_files_that_can_not_be_are_refused_and_store_nothing(
    service: Service, files: list[FileEntry]
) -> None:
    with pytest.raises(BadUpload):
        await service.jobs.code.describe(files, "ann")
    assert not any(rows(service).values())


async def test_names_that_look_alike_are_told_apart_in_the_refusal(service: Service) -> None:
    with pytest.raises(BadUpload, match=r"'cafe\\u0301.py' and 'caf\\xe9.py' can't both"):
        await service.jobs.code.describe([entry("caf\u00e9.py"), entry("cafe\u0301.py")], "ann")


async def test_a_size_that_its_parts_do_not_have_is_refused(service: Service) -> None:
    await service.jobs.code.put_parts({sha(PROGRAM): PROGRAM}, "ann")
    with pytest.raises(BadUpload, match="does not match the sizes of its parts"):
        await service.jobs.code.describe([FileEntry("a", 3, False, (sha(PROGRAM),))], "ann")


async def test_a_damaged_part_is_refused_whole(service: Service) -> None:
    with pytest.raises(BadUpload, match="damaged"):
        await service.jobs.code.put_parts({sha(b"x"): b"x", sha(b"y"): b"z"}, "ann")
    too_large = bytes(PART_BYTES + 1)
    with pytest.raises(BadUpload, match="at most 4194304 bytes"):
        await service.jobs.code.put_parts({sha(too_large): too_large}, "ann")
    assert (rows(service)["code_packs"], objects(service)) == (0, [])


async def test_what_is_damaged_or_gone_in_the_storage_is_not_read(service: Service) -> None:
    code = await upload(service, train_py=PROGRAM)
    description, pack = sorted(objects(service), key=lambda path: path.suffix != ".json")
    pack.write_bytes(PROGRAM.swapcase())
    with pytest.raises(StorageUnavailable, match="is damaged"):
        await contents(service, code)
    pack.unlink()
    with pytest.raises(StorageUnavailable, match="is missing"):
        await _submit(service, code=code, entrypoint="train.py")
    description.write_bytes(b"{}")
    with pytest.raises(StorageUnavailable, match="is damaged"):
        await service.jobs.code.files("ann", code)


async def test_more_than_the_limit_is_refused(
    database: Database, storage: Storage, tmp_path: Path
) -> None:
    service = Service(database, storage, tmp_path, code_limit_bytes=1 << 20)
    with pytest.raises(UploadTooLarge, match="at most 1048576 bytes"):
        await service.jobs.code.describe([entry("big", bytes((1 << 20) + 1))], "ann")
    for number in range(3):  # parts without code
        part = bytes([number]) * (1 << 20)
        await service.jobs.code.put_parts({sha(part): part}, "ann")
    with pytest.raises(UploadTooLarge, match="uploaded parts from incomplete uploads"):
        await service.jobs.code.put_parts({sha(PROGRAM): PROGRAM}, "ann")
    await service.jobs.code.put_parts({sha(PROGRAM): PROGRAM}, "bob")


async def test_code_goes_with_the_last_job_that_has_it(service: Service) -> None:
    code = await upload(service, train_py=PROGRAM, shared_py=b"a = 1")
    other = await upload(service, train_py=PROGRAM, more_py=b"b = 2")
    one = await _submit(service, code=code, entrypoint="train.py")
    two = await _submit(service, code=code, entrypoint="./train.py")
    service.advance((KEPT + timedelta(seconds=1)).total_seconds())
    assert (
        await service.jobs.code.sweep(service.now) == 2
    )  # the description and the pack of the other code
    assert await contents(service, code) == {"train.py": PROGRAM, "shared.py": b"a = 1"}
    missing = (await service.jobs.code.describe([entry("more.py", b"b = 2")], "ann")).missing
    assert (missing, other != code) == ([sha(b"b = 2")], True)
    for job_id in (one, two):
        await service.jobs.cancel(job_id)
        await service.jobs.delete(job_id)
        await service.jobs.code.sweep(service.now)
    assert rows(service) == dict.fromkeys(rows(service), 0)
    assert objects(service) == []


async def test_an_upload_under_way_is_not_swept(service: Service) -> None:
    await service.jobs.code.put_parts({sha(PROGRAM): PROGRAM}, "ann")
    service.advance((KEPT - timedelta(seconds=1)).total_seconds())
    assert not (await service.jobs.code.describe([entry("a.py")], "ann")).missing  # used again
    service.advance(2)
    assert await service.jobs.code.sweep(service.now) == 0
    assert await upload(service, a_py=PROGRAM)


async def test_a_pack_that_was_never_written_is_swept(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str, data: bytes) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(service.storage, "write_bytes", fail)
        with pytest.raises(OSError, match="power cut"):
            await service.jobs.code.put_parts({sha(PROGRAM): PROGRAM}, "ann")
    assert (await service.jobs.code.describe([entry("a.py")], "ann")).missing == [sha(PROGRAM)]
    service.advance(KEPT.total_seconds() + 1)
    await service.jobs.code.sweep(service.now)
    assert rows(service)["code_packs"] == 0


@pytest.mark.parametrize(
    ("script", "pointer", "words"),
    [
        ({"entrypoint": "none.py"}, "/script/entrypoint", "no file 'none.py'"),
        ({"entrypoint": "none/../train.py"}, "/script/entrypoint", "no file 'none/../train.py'"),
        ({"entrypoint": "bad.py"}, "/script/entrypoint", "bad.py is not Python: line 2"),
        ({"module": "package.none"}, "/script/module", "no module package.none"),
        (
            {"entrypoint": "train.py", "roles": {"worker": {}, "ps": {"entrypoint": "ps.py"}}},
            "/script/roles/ps/entrypoint",
            "no file 'ps.py'",
        ),
        (
            {"module": "package.main", "roles": {"eval": {"entrypoint": "bad.py"}}},
            "/script/roles/eval/entrypoint",
            "bad.py is not Python",
        ),
        (
            {"entrypoint": "mpi.py", "framework": "mpi"},
            "/script/entrypoint",
            "mpi.py imports mpi4py on line 2: mpi4py's ranks find each other through the daemons",
        ),
        (
            {"entrypoint": "mpi_too.py", "framework": "mpi"},
            "/script/entrypoint",
            "imports mpi4py on line 1",
        ),
    ],
)
@ON_SQLITE
async def test_a_program_that_can_not_run_is_found_at_submit(
    service: Service, script: dict[str, Any], pointer: str, words: str
) -> None:
    entries = {
        "train.py": PROGRAM,
        "bad.py": b"x = 1\nif x\n",
        "package/main.py": PROGRAM,
        "mpi.py": b"import os\nfrom mpi4py import MPI\n",
        "mpi_too.py": b"import mpi4py.MPI\n",
    }
    await service.jobs.code.put_parts({sha(data): data for data in entries.values()}, "ann")
    code = await service.jobs.code.describe([entry(n, d) for n, d in entries.items()], "ann")
    with pytest.raises(CodeUnfit, match=words) as caught:
        await _submit(service, code=code.id, **script)
    assert caught.value.pointer == pointer
    assert await _submit(service, code=code.id, module="package.main")
    assert await _submit(service, code=code.id, entrypoint="train.py", framework="mpi")
    assert await _submit(service, code=code.id, module="torch.distributed.run")


async def test_a_program_that_takes_long_to_parse_is_not_parsed(service: Service) -> None:
    code = await upload(service, big_py=b"if x\n" + b"#" * LARGEST_PARSED_BYTES)
    assert LARGEST_PARSED_BYTES <= 256 << 10  # parsing blocks the service
    assert await _submit(service, code=code, entrypoint="big.py")


NET = b"import torch\n\nclass Net(torch.nn.Module):\n    pass\n\nsmall = other = Net\n"


@pytest.mark.parametrize(
    ("target", "words", "hint"),
    [
        (
            "none:Net",
            "no module none in the code, which contains neither none.py nor none/__init__.py",
            "net.py",
        ),
        ("package.none:Net", "no module package.none", "net.py"),
        ("net:Other", "net.py does not define Other", "it defines Net, other, small, torch"),
        ("bad:Net", "bad.py is not Python: line 1", None),
    ],
)
@ON_SQLITE
async def test_a_model_that_is_not_in_the_code_is_found_at_submit(
    service: Service, target: str, words: str, hint: str | None
) -> None:
    files = {
        "net.py": NET,
        "package/__init__.py": b"from .net import *\n",
        "package/net.py": NET,
        "bad.py": b"class\n",
    }
    await service.jobs.code.put_parts({sha(data): data for data in files.values()}, "ann")
    code = await service.jobs.code.describe([entry(n, d) for n, d in files.items()], "ann")
    with pytest.raises(CodeUnfit, match=words) as caught:
        await _submit_model(service, target, code.id)
    assert caught.value.pointer == "/model/import"
    assert hint is None or hint in (caught.value.hint or "")
    for fit in ("net:Net", "net:small", "package.net:Net", "package:Net"):
        job_id = await _submit_model(service, fit, code.id)
        query = select(JobRow.code, JobRow.spec).where(JobRow.id == job_id)
        kept, document = service.database.read_sync(lambda s, q=query: s.execute(q).one())
        assert (kept, document["model"]["import"]) == (code.id, fit)
    with pytest.raises(CodeUnfit, match="no code") as caught:
        await _submit_model(service, "net:Net", code.id, owner="bea")
    assert caught.value.pointer == "/model/code"


@ON_SQLITE
async def test_a_metric_that_is_not_in_the_code_is_found_at_submit(service: Service) -> None:
    await service.jobs.code.put_parts({sha(NET): NET}, "ann")
    code = await service.jobs.code.describe([entry("net.py", NET)], "ann")

    async def submit(target: str, owner: str = "ann") -> str:
        document = {
            "recipe": "fine_tuning",
            "model": {"base": "file:///elsewhere", "code": code.id},
            "data": {"source": "file:///a.jsonl"},
            "method": {"metrics": {"mine": target}},
        }
        job, _ = await service.jobs.submit(JobSpec.model_validate(document), owner=owner)
        return job.id

    for target, words in (
        ("none:Net", "no module none in the code"),
        ("net:Other", "net.py does not define Other"),
    ):
        with pytest.raises(CodeUnfit, match=words) as caught:
            await submit(target)
        assert caught.value.pointer == "/method/metrics/mine"
    with pytest.raises(CodeUnfit, match="no code") as caught:
        await submit("net:Net", owner="bea")
    assert caught.value.pointer == "/model/code"
    job_id = await submit("net:Net")
    query = select(JobRow.code).where(JobRow.id == job_id)
    assert service.database.read_sync(lambda s: s.scalar(query)) == code.id


async def _submit_model(service: Service, target: str, code: str, owner: str = "ann") -> str:
    from tests.unit.service.helpers import spec

    document = spec(model={"import": target, "code": code})
    job, _ = await service.jobs.submit(document, owner=owner)
    return job.id


async def test_a_model_of_ones_own_needs_storage_that_is_a_folder(service: Service) -> None:
    from tests.unit.service.helpers import spec

    document = spec(model={"import": "net:Net"})
    assert await models.why_unfit(service.jobs.code, document, "ann", "file:///x") is None
    unfit = await models.why_unfit(service.jobs.code, document, "ann", "s3://bucket")
    assert unfit is not None
    assert "requires the storage to be a local folder" in unfit.message
