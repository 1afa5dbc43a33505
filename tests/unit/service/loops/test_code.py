"""The life of uploaded code: upload, use in an attempt, and deletion."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dray.code.manifest import FileEntry
from dray.views import JobState
from ray_workers.node.folders.code_cache import CodeCache
from ray_workers.shared.node_needs import CodeRef, RemoteCodeRef
from service.code.uploads import KEPT
from service.runtime import Runtime
from tests.marks import ON_SQLITE
from tests.unit.service.loops.world import World, comes_to, eventually

pytestmark = ON_SQLITE

PROGRAM = b"print('hello')\n"


async def upload(runtime: Runtime) -> str:
    part = hashlib.sha256(PROGRAM).hexdigest()
    await runtime.jobs.code.put_parts({part: PROGRAM}, "default")
    files = [FileEntry("train.py", len(PROGRAM), False, (part,))]
    return (await runtime.jobs.code.describe(files, "default")).id


async def test_a_node_finds_the_uploaded_files_by_what_the_attempt_says(
    world: World, tmp_path: Path
) -> None:
    runtime = await world.open()
    code = await upload(runtime)
    script = {"code": code, "entrypoint": "train.py"}
    job_id = await world.submit(runtime, "trains", recipe=None, script=script)
    attempt = await world.fake.launched(job_id)
    assert isinstance(attempt.code, CodeRef)
    assert attempt.code.id == code
    CodeCache(tmp_path / "copies").put_into(attempt.code, attempt.storage_url, tmp_path / "work")
    assert (tmp_path / "work" / "train.py").read_bytes() == PROGRAM
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    recipe = await world.submit(runtime, "trains")
    assert (await world.fake.launched(recipe)).code is None


async def test_an_attempt_says_where_its_nodes_fetch_the_code(world: World) -> None:
    runtime = await world.open()
    code = {"git": "https://192.0.43.8/me/net.git", "commit": "a" * 40, "credentials": "mine"}
    script = {"code": code, "entrypoint": "train.py"}
    job_id = await world.submit(runtime, "trains", recipe=None, script=script)
    found = (await world.fake.launched(job_id)).code
    assert isinstance(found, RemoteCodeRef)
    assert (found.git, found.commit, found.credentials) == tuple(code.values())
    assert found.limit_bytes == runtime.settings.code_limit_bytes


async def test_the_retention_deletes_code_that_no_job_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_timings(retention_period_s=0.05, expiry_period_s=0.05)
    runtime = await world.open()
    code = await upload(runtime)
    monkeypatch.setattr("service.code.uploads.KEPT", -KEPT)  # as if a long time had passed
    folder = runtime.storage.folder
    assert folder is not None

    async def is_gone() -> bool:
        return not [path for path in (folder / "code").rglob("*") if path.is_file()]

    await eventually(is_gone, f"{code} is kept though nothing names it")
